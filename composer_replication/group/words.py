"""Numbers, and sentences about a run, for people. Imports neither torch nor Composer."""

from __future__ import annotations

from collections.abc import Sequence

FRUITLESS_SYNCS = 2
"""After so many syncs in a row to which no group has contributed, a run that ends has failed. After
one such sync the groups go on from the global parameters: a bad batch costs a round."""


def why_nothing_was_learned(outer_steps: int, inner_steps: int, fruitless: int) -> str:
    """Say why training that has ended without an error is no success; empty if it is one.

    Args:
        outer_steps: Outer steps of the run.
        inner_steps: Inner steps of the group.
        fruitless: The number of its last syncs to which no group has contributed.
    """
    if fruitless >= (FRUITLESS_SYNCS if outer_steps else 1):
        since = f" since outer step {outer_steps}" if outer_steps else ""
        syncs = "sync" if fruitless == 1 else f"{fruitless} syncs"
        return (
            f"this run has learned nothing{since}: in its last {syncs} every "
            "group's pseudo-gradient was not finite or far too long, and was thrown away; lower "
            "the learning rate, or find the batch whose loss is not finite"
        )
    if inner_steps and not outer_steps:
        return (
            f"this run has learned nothing: its {plural(inner_steps, 'inner step')} were never "
            "synced; use a sync_every below that, or leave final_sync on"
        )
    return ""


def plural(number: int, thing: str, things: str = "") -> str:
    """Format a number with its noun.

    Args:
        number: The number.
        thing: The noun in the singular.
        things: Its plural. Empty: the singular with an "s".
    """
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def format_bytes(num_bytes: float) -> str:
    """Format a size in three digits, such as ``1.33 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def format_duration(seconds: float) -> str:
    """Format seconds for people, such as ``3 min 20 s``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def format_roughly(seconds: float) -> str:
    """Format seconds in one unit, such as ``45 s``, ``12 min`` or ``3 h``."""
    for unit, length in (("s", 1), ("min", 60)):
        if seconds < 100 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 3600:.0f} h"


def listed_groups(names: Sequence[str]) -> str:
    """Name replica groups: ``group 1``, ``groups 0, 1 and 2``, or how many, if they are many."""
    if len(names) > 8:
        return f"{len(names)} groups"
    *others, last = names
    return f"groups {', '.join(others)} and {last}" if others else f"group {last}"
