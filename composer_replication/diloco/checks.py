"""Checks of single values. Each error contains the name, the value and the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_integer(name: str, value: object, *, at_least: int) -> None:
    """Reject a value that is not an integer, or too small.

    Raises:
        ValueError: The value is not an integer of at least ``at_least``.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r}: use an integer of at least {at_least}")


def check_number(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    below: bool = False,
    alternative: str | None = None,
) -> None:
    """Reject a value that is not a finite number, or out of bounds.

    Args:
        name: The name of the argument.
        value: Its value.
        low: The smallest value allowed.
        high: The largest value allowed.
        below: Whether ``high`` itself is not allowed.
        alternative: What may be there instead of a number, for the message.

    Raises:
        ValueError: The value is not a finite number within the bounds.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (below and value == high):  # pyright: ignore
        bounds = f"{low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
        bounds += (", exclusive" if below else "") + (f", or {alternative}" if alternative else "")
        raise ValueError(f"{name}={value!r}: use a number {bounds}")


def check_seconds(name: str, value: object, alternative: str = "") -> None:
    """Reject a value that is not a duration in seconds.

    Args:
        name: The name of the argument.
        value: Its value.
        alternative: What may be there instead of a number, for the message.

    Raises:
        ValueError: The value is not a finite number above 0.
    """
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        bounds = "a number of seconds above 0" + (f", or {alternative}" if alternative else "")
        raise ValueError(f"{name}={value!r}: use {bounds}")


def check_choice(name: str, value: str | None, choices: Sequence[str | None]) -> None:
    """Reject a value that is none of the choices.

    Raises:
        ValueError: The value is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use {' or '.join(filter(None, choices))}")
