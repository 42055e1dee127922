"""How to read the outer loop's metrics, in a sentence each."""

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
        "Cosine of the mean pseudo-gradient and the outer momentum: well above 0 the outer steps "
        "keep their direction; about 0 or below for many rounds they overshoot, and a lower "
        "outer_lr or outer_momentum helps.",
    ),
    Reading(
        "between groups",
        ("group_cosine",),
        "Mean cosine of two groups' pseudo-gradients: it falls while the groups learn, to about 0 "
        "if they share little; near 1 for many rounds they undo the same outer step that was too "
        "long, or could sync less often; below 0 they undo each other: compare their data.",
    ),
    Reading(
        "mean / group norm",
        ("mean_norm_ratio",),
        "What averaging leaves of the groups' movement: 1 if they move alike, 1 / sqrt(k) if k "
        "groups move at right angles; the lower it is, the higher an outer_lr it takes.",
    ),
    Reading(
        "loss after, before",
        ("loss_after", "loss_before"),
        "Mean loss of the groups in the first steps after a sync and in the last before the next: "
        "if the syncs raise it, and the inner steps no longer make up for that, the outer steps "
        "are too long, and a lower outer_lr helps.",
    ),
    Reading(
        "spread after, before",
        ("loss_spread_after", "loss_spread_before"),
        "Largest minus smallest loss of a group at these times: a group that is apart after the "
        "syncs has other data or a fault, and one that moves apart before them another learning "
        "rate; how much chance makes of it, the first rounds show.",
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
