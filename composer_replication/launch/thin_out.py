"""Selects the syncs of a long run that a picture or the page shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from composer_replication.callback.run_folder import OUTER_STEP


def thin_out(
    lines: Iterable[dict[str, Any]], keys: Collection[str], most: int
) -> list[dict[str, Any]]:
    """Select evenly spaced syncs of a group, without those that a resume repeated.

    However many syncs there are, no more than ``most`` of them are held in memory.

    Args:
        lines: The group's metrics, one item for each sync.
        keys: What to keep of each sync, and ``diloco/outer_step``.
        most: Most syncs to select.
    """
    kept: list[dict[str, Any]] = []
    every = 1
    for index, line in enumerate(lines):
        while kept and kept[-1][OUTER_STEP] >= line[OUTER_STEP]:
            kept.pop()
        if index % every:
            continue
        kept.append({key: line[key] for key in (OUTER_STEP, *keys) if key in line})
        if len(kept) > most:
            kept = kept[::2]
            every *= 2
    return kept
