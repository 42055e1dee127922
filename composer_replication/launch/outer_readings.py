"""How to read the outer loop's metrics, in a line each. docs/outer-loop.md says more."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple


class Reading(NamedTuple):
    """A row of the report and of the coordinator's page.

    Attributes:
        title: What it is about, in a few words.
        names: Its metrics, by their names in ``SyncReport``.
        sentence: How to read them.
    """

    title: str
    names: tuple[str, ...]
    sentence: str


READINGS = (
    Reading(
        "mean and momentum",
        ("momentum_cosine",),
        "Well above 0 the outer steps are steady; about 0 or below they overshoot: lower outer_lr.",
    ),
    Reading(
        "between groups",
        ("group_cosine",),
        "It falls as groups learn. Near 1 for long: lower outer_lr. Below 0: compare their data.",
    ),
    Reading(
        "mean / group norm",
        ("mean_norm_ratio",),
        "1 if the groups move alike, 1 / sqrt(k) if k groups move at right angles.",
    ),
)


def describe_outer_loop(syncs: Iterable[dict[str, Any]], num_syncs: int) -> list[tuple[str, str]]:
    """Rows of the report: each metric's mean over the last quarter of the syncs, and its sentence.

    Args:
        syncs: Metrics of one group, one item for each sync. The other groups have the same.
        num_syncs: How many they are.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for index, line in enumerate(syncs):
        if index >= num_syncs * 3 // 4:
            for reading in READINGS:
                for name in reading.names:
                    value = line.get(f"diloco/{name}")
                    if value is not None and math.isfinite(value):
                        values[name].append(value)
    return [
        (title, f"{', '.join(f'{fmean(values[name]):.3g}' for name in names)}   ({sentence})")
        for title, names, sentence in READINGS
        if all(values[name] for name in names)
    ]
