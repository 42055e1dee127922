"""Numbers that tell a bad setting of the outer loop while it trains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

ROUNDS = 5
"""Rounds over which losses are averaged before they are compared."""

HISTORY = 10 * ROUNDS
"""Rounds that the latest ones are compared with."""

USUAL_CHANGES = 4.0
"""By so many usual changes a loss that varies by chance alone rises about once in 30,000 rounds."""

QUIET_ROUNDS = 20
"""After a warning there is no other for so many rounds."""

HEALTH = (
    "momentum_cosine",
    "group_cosine",
    "mean_norm_ratio",
    "loss_after",
    "loss_before",
    "loss_spread_after",
    "loss_spread_before",
)
"""Fields of ``SyncReport`` that tell how the outer loop does; equal in all groups of a sync."""


class Vitals(NamedTuple):
    """What one replica group says about itself beside a sync. Missing numbers are NaN.

    Attributes:
        contribution: Its weight in the mean; 0 if it contributes nothing.
        norm: L2 norm of its pseudo-gradient; 0 if it contributes nothing.
        loss_after: Its mean training loss in the first inner steps after the previous sync.
        loss_before: The same in the last inner steps before this sync.
    """

    contribution: float = 0.0
    norm: float = 0.0
    loss_after: float = math.nan
    loss_before: float = math.nan


class StepNorms(NamedTuple):
    """L2 norms of what one outer step was made of, over all ranks of the group.

    Attributes:
        mean: Of the mean pseudo-gradient; 0 if there was no outer step.
        stepped: The same over the tensors that the outer optimizer moved.
        momentum_before: Of the outer momentum before the step.
        momentum: Of the outer momentum after it.
        decay: The outer optimizer's ``momentum``; 0 if it is no SGD with momentum alone.
    """

    mean: float = 0.0
    stepped: float = 0.0
    momentum_before: float = 0.0
    momentum: float = 0.0
    decay: float = 0.0

    @classmethod
    def of_sums(cls, stepped: float, still: float, divisor: float) -> StepNorms:
        """From ``divisor`` times the norms of what the outer optimizer moved, and of the rest."""
        return cls(math.hypot(stepped, still) / divisor, stepped / divisor)

    @property
    def momentum_cosine(self) -> float | None:
        """Cosine between the mean pseudo-gradient and the momentum before the step.

        It needs no pass over memory: from ``momentum = decay * momentum_before + mean`` follows the
        product of the two on the right. None: there was no momentum.
        """
        product = self.decay * self.momentum_before * self.stepped
        if not product > 0.0:
            return None
        squares = self.momentum**2 - (self.decay * self.momentum_before) ** 2 - self.stepped**2
        return _cosine(squares / (2 * product))


def directions(vitals: Sequence[Vitals], mean_norm: float) -> dict[str, float | None]:
    """How far the groups' pseudo-gradients agree, from their norms and the norm of their mean.

    The square of a sum is the sum of the squares and of twice all products of two. So the norms of
    the groups, which travel beside the sync, tell the mean product without any group having the
    pseudo-gradient of another.

    Args:
        vitals: Of the groups in the sync.
        mean_norm: L2 norm of the mean of their pseudo-gradients.

    Returns:
        ``group_cosine`` and ``mean_norm_ratio`` of ``SyncReport``. None: fewer than two groups had
        a pseudo-gradient, so there is nothing to compare.
    """
    total = sum(group.contribution for group in vitals)
    norms = [group.contribution / total * group.norm for group in vitals if group.norm > 0.0]
    if len(norms) < 2:
        return {"group_cosine": None, "mean_norm_ratio": None}
    mean_of_norms, squares = sum(norms), sum(norm**2 for norm in norms)
    cosine = (mean_norm**2 - squares) / (mean_of_norms**2 - squares)
    return {"group_cosine": _cosine(cosine), "mean_norm_ratio": mean_norm / mean_of_norms}


def losses(vitals: Sequence[Vitals]) -> dict[str, float | None]:
    """The mean and the spread over the groups of ``loss_after`` and ``loss_before``.

    Returns:
        ``loss_...`` and ``loss_spread_...`` of ``SyncReport``. None: no group has said its loss, or
        for the spread only one.
    """
    values: dict[str, float | None] = {}
    for when in ("after", "before"):
        said = [x for group in vitals if math.isfinite(x := getattr(group, f"loss_{when}"))]
        values[f"loss_{when}"] = fmean(said) if said else None
        values[f"loss_spread_{when}"] = max(said) - min(said) if len(said) > 1 else None
    return values


def _cosine(value: float) -> float:
    """Norms are rounded, and a cosine from them may be out of range by that."""
    return max(-1.0, min(1.0, value))


class LossNotes:
    """This group's training losses since the last sync."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def note(self, loss: float) -> None:
        """Add the loss of an inner step."""
        self._losses.append(loss)

    def clear(self) -> None:
        """Begin anew, after a sync or when the inner steps have been thrown away."""
        self._losses.clear()

    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last quarter, at least of one step each."""
        if not self._losses:
            return math.nan, math.nan
        count = max(1, len(self._losses) // 4)
        return fmean(self._losses[:count]), fmean(self._losses[-count:])


class LossWatch:
    """Tells when the outer loop is unstable.

    An outer step that is too long raises the loss, and the inner steps no longer make up for it. So
    of the last ``ROUNDS`` rounds two things are asked, about the mean loss of all groups:

    * The syncs raise it, and the inner steps between them lower it. Where the inner steps raise it
      too, the data has become harder or the inner learning rate is too high.
    * After the syncs it is higher than in the best ``ROUNDS`` rounds before, by ``USUAL_CHANGES``
      times the median change of the loss before a sync from one round to the next.

    Rounds with another number of groups are not compared.

    Args:
        syncs_in_round: Number of fragments.
    """

    def __init__(self, syncs_in_round: int) -> None:
        self._syncs_in_round = syncs_in_round
        self._before: float | None = None
        self._syncs: list[Losses] = []
        self._rounds: deque[Losses] = deque(maxlen=HISTORY)
        self._num_groups = self._quiet = 0

    def look(self, vitals: Sequence[Vitals]) -> str | None:
        """Take the losses of a sync. Returns what is to be said about them, None in a good run."""
        groups = sum(math.isfinite(group.loss_before) for group in vitals)
        if groups != self._num_groups:
            self._num_groups, self._before = groups, None
            self._syncs.clear()
            self._rounds.clear()
        now = losses(vitals)
        before, after, last = self._before, now["loss_after"], now["loss_before"]
        self._before = last
        if before is None or after is None or last is None:
            return None
        self._syncs.append((before, after, last))
        if len(self._syncs) < self._syncs_in_round:
            return None
        self._rounds.append(_means(self._syncs))
        self._syncs.clear()
        self._quiet = max(0, self._quiet - 1)
        words = None if self._quiet else self._judge(list(self._rounds))
        if words:
            self._quiet = QUIET_ROUNDS
        return words

    @staticmethod
    def _judge(rounds: list[Losses]) -> str | None:
        if len(rounds) < 2 * ROUNDS:
            return None
        windows = [_means(rounds[i : i + ROUNDS]) for i in range(len(rounds) - ROUNDS + 1)]
        before, after, last = windows[-1]
        lowest = min(earlier for _, earlier, _ in windows[:-ROUNDS])
        usual = median(abs(one[2] - other[2]) for one, other in pairwise(rounds))
        if after <= max(before, last) or after - lowest <= USUAL_CHANGES * usual:
            return None
        return (
            f"in the last {ROUNDS} rounds the syncs raised the mean training loss of all groups "
            f"from {before:.4g} to {after:.4g}; the inner steps brought it down to {last:.4g}, and "
            f"after earlier syncs it was {lowest:.4g}"
        )


Losses = tuple[float, float, float]
"""Before a sync, after it, and before the next one."""


def _means(losses: Sequence[Losses]) -> Losses:
    before, after, last = zip(*losses, strict=True)
    return fmean(before), fmean(after), fmean(last)
