"""Metrics of the outer loop, from numbers that the groups send each other beside a sync."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import NamedTuple


class Vitals(NamedTuple):
    """Metrics that one replica group sends the others beside a sync. Missing numbers are NaN.

    Attributes:
        contribution: Its weight in the mean; 0 if it contributes nothing.
        norm: L2 norm of its pseudo-gradient; 0 if it contributes nothing.
        step_s: Seconds that one of its inner steps takes; only measured with ``round_seconds``.
        sent_norm: L2 norm of what it sends: the pseudo-gradient with the residual, in its wire
            format.
        inner_steps: Inner steps that the pseudo-gradient covers.
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
        """``sent_norm`` divided by ``inner_steps``."""
        return self.sent_norm / max(1.0, self.inner_steps)


BEYOND = 10.0
"""A pseudo-gradient that is so many times as long as the others' is taken for an error."""


def beyond_all_others(groups: Mapping[int, Vitals]) -> dict[int, str]:
    """Find the groups whose pseudo-gradient is so long that it must be an error.

    Each is compared with the median of all groups that contribute; of two groups with the other one
    and with its own last syncs. It must be beyond ten times that per inner step, and in all: a
    group that has taken few steps moves further in each step than groups whose steps cancel out in
    part.

    Args:
        groups: The metrics of the groups in a sync, by rank in the quorum.
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
    """L2 norms in one outer step, over all ranks of the group.

    Attributes:
        mean: Norm of the mean pseudo-gradient; 0 if there was no outer step.
        stepped: Its norm over the tensors that the outer optimizer moved.
        momentum_before: Norm of the outer momentum before the step.
        momentum: Norm of the outer momentum after it.
        decay: The outer optimizer's ``momentum``; 0 if it is no SGD with momentum alone.
    """

    mean: float = 0.0
    stepped: float = 0.0
    momentum_before: float = 0.0
    momentum: float = 0.0
    decay: float = 0.0

    @classmethod
    def of_parts(cls, stepped: float, still: float) -> StepNorms:
        """Make it from the mean's norms over what the outer optimizer moved, and over the rest."""
        return cls(math.hypot(stepped, still), stepped)

    @property
    def momentum_cosine(self) -> float | None:
        """Cosine between the mean pseudo-gradient and the momentum before the step.

        It needs no pass over memory: from ``momentum = decay * momentum_before + mean`` follows the
        product of the two on the right (ADR-033). None: there was no momentum.
        """
        product = self.decay * self.momentum_before * self.stepped
        if not product > 0.0:
            return None
        squares = self.momentum**2 - (self.decay * self.momentum_before) ** 2 - self.stepped**2
        return _cosine(squares / (2 * product))


def directions(vitals: Sequence[Vitals], mean_norm: float) -> dict[str, float | None]:
    """Compute how far the groups' pseudo-gradients agree, from their norms and that of their mean.

    The square of a sum is the sum of the squares and of twice all products of two. So the groups'
    norms give the mean product, although no group has the pseudo-gradient of another (ADR-033).

    Args:
        vitals: The metrics of the groups in the sync.
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
    """Clamp a cosine, since rounded norms may put it out of range. None if it is not finite."""
    return max(-1.0, min(1.0, value)) if math.isfinite(value) else None
