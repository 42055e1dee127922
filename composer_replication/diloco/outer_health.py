"""Numbers that tell a bad setting of the outer loop while it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple


class Vitals(NamedTuple):
    """What one replica group says about itself beside a sync. Missing numbers are NaN.

    Attributes:
        contribution: Its weight in the mean; 0 if it contributes nothing.
        norm: L2 norm of its pseudo-gradient; 0 if it contributes nothing.
        step_s: Seconds that one of its inner steps takes; only measured with ``round_seconds``.
        sent_norm: L2 norm of what it sends of that: with a residual, in a wire format.
        inner_steps: Inner steps in it.
        usual_pace: The largest norm per inner step in its last syncs of the same fragment.
    """

    contribution: float = 0.0
    norm: float = 0.0
    step_s: float = math.nan
    sent_norm: float = 0.0
    inner_steps: float = 0.0
    usual_pace: float = math.nan

    @property
    def pace(self) -> float:
        """The norm of what was sent, for each inner step in it."""
        return self.sent_norm / max(1.0, self.inner_steps)


BEYOND = 10.0
"""A pseudo-gradient that is so many times as long as the others' is an error, and no sample."""


def beyond_all_others(groups: Mapping[int, Vitals]) -> dict[int, str]:
    """Which groups' pseudo-gradients are so long that they are an error, with the reason.

    Each is compared with the median of all that contribute, and between two groups with the other
    and with its own last syncs. It has to be beyond ten times that per inner step, and in all: a
    group that has taken few steps moves further in each than groups whose steps cancel out in part.

    Args:
        groups: What the groups of a sync say about themselves, by rank.
    """
    sent = {rank: group for rank, group in groups.items() if group.contribution > 0.0}
    found = {}
    for rank, group in sent.items() if len(sent) > 1 else ():
        others = [other for each, other in sent.items() if each != rank or len(sent) > 2]
        pace = median_low(other.pace for other in others)
        norm = median_low(other.sent_norm for other in others)
        is_unusual = len(sent) > 2 or group.pace > BEYOND * group.usual_pace
        if pace and is_unusual and group.pace > BEYOND * pace and group.sent_norm > BEYOND * norm:
            found[rank] = (
                f"its pseudo-gradient is {group.pace / pace:.3g} times as long per inner step as "
                f"that of {'most groups' if len(sent) > 2 else 'the other group'}"
            )
    return found


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
    def of_parts(cls, stepped: float, still: float) -> StepNorms:
        """From the norms of the mean over what the outer optimizer moved, and over the rest."""
        return cls(math.hypot(stepped, still), stepped)

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
    squares = products = mean_of_norms = 0.0
    for group in vitals:
        norm = group.contribution / total * group.norm if group.norm > 0.0 else 0.0
        squares, products = squares + norm**2, products + mean_of_norms * norm
        mean_of_norms += norm
    if not products > 0.0:
        return {"group_cosine": None, "mean_norm_ratio": None}
    return {
        "group_cosine": _cosine((mean_norm**2 - squares) / (2 * products)),
        "mean_norm_ratio": mean_norm / mean_of_norms,
    }


def _cosine(value: float) -> float | None:
    """Norms are rounded, and a cosine from them may be out of range by that."""
    return max(-1.0, min(1.0, value)) if math.isfinite(value) else None
