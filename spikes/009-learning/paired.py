"""Differences between two arms of the study, seed by seed, and what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

T_95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
    1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
)  # fmt: skip
"""Student's t, 95th percentile, for 1 to 20 degrees of freedom."""


class Difference(NamedTuple):
    """How an arm differs from its base, in percent of the base's loss, over the seeds of both.

    ``low`` and ``high`` are the ends of the 90 % interval of the mean: the two one-sided tests at
    5 % show an equivalence within a bound if the interval lies inside it. NaN with one seed.
    """

    seeds: int
    mean: float
    spread: float
    low: float
    high: float

    def is_within(self, percent: float) -> bool:
        """Whether both tests reject a difference of that size or more."""
        return -percent < self.low and self.high < percent

    def __str__(self) -> str:
        if self.seeds < 2:
            return f"{self.mean:+.2f} %"
        return f"{self.mean:+.2f} % [{self.low:+.2f}, {self.high:+.2f}]"


def compare(arm: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compare the losses of two arms by seed; None if they have no seed in common."""
    seeds = sorted(arm.keys() & base.keys())
    if not seeds:
        return None
    if len(seeds) - 1 > len(T_95):
        raise ValueError(f"{len(seeds)} seeds: extend T_95, which ends at {len(T_95) + 1}")
    percents = [100 * (arm[seed] / base[seed] - 1) for seed in seeds]
    mean = statistics.fmean(percents)
    if len(seeds) == 1:
        return Difference(1, mean, math.nan, math.nan, math.nan)
    spread = statistics.stdev(percents)
    half = T_95[len(seeds) - 2] * spread / math.sqrt(len(seeds))
    return Difference(len(seeds), mean, spread, mean - half, mean + half)
