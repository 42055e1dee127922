"""Checks of single values, each with an error that has the name, the value and the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence


def check_integer(name: str, value: object, *, at_least: int) -> None:
    """Refuse what is no integer, or too small.

    Raises:
        ValueError: It is.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}={value!r}: use an integer of at least {at_least}")


def check_number(name: str, value: object, low: float, high: float, *, below: bool = False) -> None:
    """Refuse what is no finite number, or out of bounds.

    Args:
        name: What the value is of.
        value: The value.
        low: The least that it may be.
        high: The most that it may be.
        below: Whether it has to be less than that.

    Raises:
        ValueError: It is.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (below and value == high):  # pyright: ignore
        bounds = f"{low:g} or more" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name}={value!r}: use a number {bounds}{', exclusive' if below else ''}")


def check_seconds(name: str, value: object) -> None:
    """Refuse what is no time that passes.

    Raises:
        ValueError: It is not finite, or not above 0.
    """
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: use a number of seconds above 0")


def check_choice(name: str, value: str | None, choices: Sequence[str | None]) -> None:
    """Refuse what is none of the choices.

    Raises:
        ValueError: It is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use {' or '.join(filter(None, choices))}")
