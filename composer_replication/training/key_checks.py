"""The error of a wrong config, and the check of its keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config is wrong. The message names the key, the value, and the fix."""


def check_keys(keys: Iterable[object], allowed: Iterable[str], where: str) -> None:
    """Reject an unknown key, and suggest the closest allowed one.

    Args:
        keys: The keys to check.
        allowed: The keys that exist.
        where: The section, for the message.

    Raises:
        ConfigError: A key is not allowed.
    """
    allowed = sorted(allowed)
    for key in keys:
        if key not in allowed:
            raise ConfigError(f"{where} has no {key!r}: {closest(key, allowed)}")


def closest(name: object, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest allowed one, and all of them."""
    allowed = sorted(allowed)
    if not allowed:
        return "leave it out"
    close = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? Allowed:" if close else "use one of"
    return f"{hint} {', '.join(allowed)}"
