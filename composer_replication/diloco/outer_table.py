"""The outer settings that ``auto`` stands for: one table, by replica groups and round length.

``auto`` becomes the numbers of the *nearest* row: the one with the smallest

    abs(log(groups / its groups)) + abs(log(sync_every / its sync_every))

and the first of several that are equally near. There is nothing in between: every value that
``auto`` takes has a row here. It is resolved once, when the run begins. The run keeps the numbers
when groups come and go, when a group joins late and when it resumes, whatever their number is by
then; a number in the config changes them. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from composer_replication.diloco.settings import AUTO, DiLoCoSettings


class OuterRow(NamedTuple):
    """The outer settings for a number of replica groups (k) and of inner steps a round (H)."""

    groups: int
    sync_every: int
    outer_lr: float
    outer_momentum: float


TABLE = (
    # k = 2, 4 and 8: our own study, docs/learning.md and ADR-045. k = 1 and 16: arXiv 2505.23725.
    OuterRow(1, 30, 0.4, 0.8),
    OuterRow(2, 30, 0.7, 0.5),
    OuterRow(4, 30, 0.8, 0.6),
    OuterRow(8, 30, 0.8, 0.7),
    OuterRow(16, 30, 1.0, 0.9),
    # k = 2: our own study. Others: the best learning rate grows with H (2503.09799, section 4).
    OuterRow(1, 100, 0.7, 0.8),
    OuterRow(2, 100, 0.7, 0.5),
    OuterRow(4, 100, 0.8, 0.9),
    OuterRow(8, 100, 0.9, 0.9),
    OuterRow(16, 100, 1.0, 0.9),
)
"""Every momentum is above 0: a sharded checkpoint is loaded into a template that has it."""

_NAMES = ("outer_lr", "outer_momentum")


def nearest_row(num_groups: int, sync_every: int) -> OuterRow:
    """Return the row of the table that ``auto`` takes."""

    def distance(row: OuterRow) -> float:
        return abs(math.log(num_groups / row.groups)) + abs(math.log(sync_every / row.sync_every))

    return min(TABLE, key=distance)


def auto_names(settings: DiLoCoSettings) -> tuple[str, ...]:
    """The names of the settings that are ``auto``."""
    return tuple(name for name in _NAMES if getattr(settings, name) == AUTO)


def resolve(
    settings: DiLoCoSettings, num_groups: int | None, begun_with: Mapping[str, Any] | None = None
) -> tuple[DiLoCoSettings, str]:
    """Put numbers in the place of ``auto``.

    Args:
        settings: With ``auto`` or without.
        num_groups: How many replica groups the run begins with; None if that is not known.
        begun_with: The settings that the run has begun with, if it has begun: it keeps their
            numbers.

    Returns:
        The settings with numbers, and a line that says which and why; empty if nothing was
        ``auto``.

    Raises:
        ValueError: The number of groups is needed and not known.
    """
    names = auto_names(settings)
    if not names:
        return settings, ""
    if begun_with is not None:
        numbers, why = begun_with, "as this run began"
    elif num_groups is None:
        raise ValueError(
            f"{names[0]}='auto' depends on the number of replica groups, which is not known: set "
            "num_replicas (or NUM_REPLICA_GROUPS) in every group, or give a number"
        )
    else:
        numbers = nearest_row(num_groups, settings.sync_every)._asdict()
        why = f"num_replicas={num_groups}, sync_every={settings.sync_every}"
    chosen = {name: numbers[name] for name in names}
    line = ", ".join(f"{name} auto = {value:g}" for name, value in chosen.items())
    return replace(settings, **chosen), f"{line} ({why})"
