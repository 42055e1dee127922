"""Numbers for people. Imports neither torch nor Composer."""

from __future__ import annotations

from collections.abc import Sequence


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


def on_same_samples(names: Sequence[str], data_fix: str) -> str:
    """Say that replica groups train on the same samples, and with what to divide them."""
    return (
        f"{listed_groups(names)} train on the same samples, their first batches are equal: give "
        f"each its own part with {data_fix}; if they are meant to be the same, set "
        "same_samples=True"
    )


def listed_groups(names: Sequence[str], limit: int = 8) -> str:
    """Name replica groups: ``group 1``, ``groups 0, 1 and 2``, or how many, if they are many."""
    if len(names) > limit:
        return f"{len(names)} groups"
    *others, last = names
    return f"groups {', '.join(others)} and {last}" if others else f"group {last}"
