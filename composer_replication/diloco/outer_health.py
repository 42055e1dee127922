"""Metrics of the outer loop, from numbers that the groups send each other beside a sync."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median, median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class GroupMetrics(NamedTuple):
    """Metrics that one replica group sends the others beside a sync. Missing numbers are NaN.

    Attributes:
        contribution: Its weight in the mean; 0 if it contributes nothing.
        norm: L2 norm of its pseudo-gradient; 0 if it contributes nothing.
        step_s: Seconds that one of its inner steps takes; only measured with ``round_seconds``.
        sent_norm: L2 norm of what it sends: the pseudo-gradient with the residual, before it is
            rounded to its wire format.
        moved: ``norm`` over parameters alone. Buffers may be unlike in honest groups, and make the
            residual of parameters beside them large.
        inner_steps: Inner steps that the pseudo-gradient covers.
        pace: How far one inner step has moved an element: the root mean square over the parameters
            that have moved at all, so that it does not matter how many are frozen.
        usual_pace: The pace that is usual for it, see ``UsualPace``.
    """

    contribution: float = 0.0
    norm: float = 0.0
    step_s: float = math.nan
    sent_norm: float = 0.0
    moved: float = 0.0
    inner_steps: float = 0.0
    pace: float = 0.0
    usual_pace: float = math.nan

    @property
    def moved_a_step(self) -> float:
        """``moved`` divided by ``inner_steps``."""
        return self.moved / max(1.0, self.inner_steps)


GroupsMetrics = Mapping[int, GroupMetrics]
"""The metrics of groups in a sync, by rank in the quorum."""

BEYOND = 10.0
"""A pseudo-gradient that is so many times as long as others and as usual is taken for an error."""

BEYOND_AT_FIRST = 100.0
"""The same for a group whose usual pace is not known, compared with others alone. In a warm-up from
0 a group that takes more inner steps in a round is far ahead, and honest."""

UNSEEN = 1e-15
"""A norm that no training notices. In fp32 the squares of numbers below 1e-19 are lost, so a norm
below this one may be another where the numbers are weighted."""

USUAL = 7
"""Over how many syncs of a fragment a pace is usual."""


def beyond_all_others(groups: GroupsMetrics) -> dict[int, str]:
    """Find the groups whose pseudo-gradient is so long that it must be an error.

    Each is compared with the median of all groups that contribute, of two groups with the other
    one, and with its own last syncs. Both its norm and its norm per inner step must be beyond ten
    times the others': a group that has taken few steps moves further in each step than groups whose
    steps cancel out in part.

    An honest group may be far beyond the others: they may be at the end of a learning rate that
    falls to 0, or have frozen what it trains. A sick one is also beyond its own usual pace.

    Args:
        groups: The groups in a sync.
    """
    sent = {rank: group for rank, group in groups.items() if group.contribution > 0.0}
    found: dict[int, str] = {}
    for rank, group in sent.items():
        others = [*sent.values()]
        if len(others) == 2:
            others.remove(group)
        moved = median_low(other.moved for other in others)
        step = median_low(other.moved_a_step for other in others)
        usual = BEYOND * group.usual_pace
        if math.isnan(usual):
            usual = BEYOND_AT_FIRST * median_low(other.pace for other in others)
        is_beyond = group.moved > BEYOND * moved and group.moved_a_step > BEYOND * step
        if moved > UNSEEN and is_beyond and group.pace > usual:
            times = group.moved_a_step / step
            whose = "most groups" if len(sent) > 2 else "the other group"
            found[rank] = (
                f"its pseudo-gradient is {times:.3g} times as long per inner step as that of "
                f"{whose}"
            )
    return found


class UsualPace:
    """The pace that is usual for this group, by its last syncs.

    A pace is kept in units of the learning rate, which may fall to 0 and begin again. So it stays
    about the same in a training, and a group that becomes sick little by little is found too. A
    learning rate counts up to the highest one that the group has trained with: one that jumps is no
    excuse.

    The fragment with the largest one counts, since a group may train a fragment that its samples
    have not needed before.

    Args:
        num_fragments: How many fragments the model has.
    """

    def __init__(self, num_fragments: int) -> None:
        self._paces = [deque[float](maxlen=USUAL) for _ in range(num_fragments)]
        self._top_lr = 0.0

    def add(self, fragment: int, pace: float, lr: float) -> None:
        """Add a committed sync of a fragment: its pace, and the mean learning rate of its steps."""
        if pace > 0 and lr > 0:
            self._paces[fragment].append(pace / lr)
            self._top_lr = max(self._top_lr, lr)

    def at(self, lr: float) -> float:
        """Return the usual pace at a learning rate; NaN before the first sync."""
        paces = [median(each) for each in self._paces if each]
        return max(paces) * min(lr, self._top_lr) if paces else math.nan

    def state_dict(self) -> dict[str, Any]:
        """What a resumed group needs, so that it is judged as before."""
        return {"paces": [[*each] for each in self._paces], "top_lr": self._top_lr}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._top_lr = state["top_lr"]
        self._paces = [deque(paces, maxlen=USUAL) for paces in state["paces"]]


def learning_rate(*optimizers: Optimizer) -> float | Tensor:
    """The largest learning rate of optimizers' groups; 1 if there is none, as in Adafactor.

    It stays a tensor on an accelerator, for which an inner step does not wait.
    """
    there: list[Tensor] = []
    here: list[float] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                there.append(rate.detach())
            elif rate is not None:
                here.append(float(rate))
    if there:
        return torch.stack(there).max()
    return max(here, default=1.0)


def group_cosine(metrics: Sequence[GroupMetrics], mean_norm: float) -> float | None:
    """Compute how far the groups' pseudo-gradients agree, from their norms and that of their mean.

    The square of a sum is the sum of the squares and of twice all products of two. So the groups'
    norms give the mean product, although no group has the pseudo-gradient of another (ADR-033).

    Args:
        metrics: The metrics of the groups in the sync.
        mean_norm: L2 norm of the mean of their pseudo-gradients.

    Returns:
        ``group_cosine`` of ``SyncReport``. None: fewer than two groups had a pseudo-gradient, so
        there is nothing to compare, or a norm is not finite.
    """
    total = sum(group.contribution for group in metrics)
    norms = [group.contribution / total * group.norm for group in metrics if group.norm > 0.0]
    squares = sum(norm**2 for norm in norms)
    products = sum(map(operator.mul, norms[1:], accumulate(norms)))
    if not products > 0.0:
        return None
    cosine = (mean_norm**2 - squares) / (2 * products)
    # Rounded norms may put it out of range.
    return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None
