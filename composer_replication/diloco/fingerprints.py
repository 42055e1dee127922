"""Compares settings: of two groups, of a checkpoint and a resume, before and after a change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer_replication.diloco.arguments import REMOVED

FIXED = ("num_fragments", "fragment_patterns", "sync_buffers", "wire_format")
"""Settings that a resume cannot change: they define the fragments and the messages. Other groups
that resume have them from their checkpoints, and a message of another size would abort these groups
inside gloo before the settings could be compared."""

COUNTED = ("samples", "tokens")
"""Values of ``weight_by`` that need a count which a checkpoint of another ``weight_by`` lacks."""


class SettingsMismatch(ValueError):
    """Two replica groups of one run were started with different settings or models."""


def compare_fingerprints(mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str) -> None:
    """Check that two groups have the same fingerprint.

    Args:
        mine: This group's fingerprint.
        theirs: The other one.
        whose: Who has the other one, for the message.

    Raises:
        SettingsMismatch: They differ. The message lists every differing key with both values.
    """
    keys = sorted(mine.keys() | theirs.keys())
    differing = [key for key in keys if mine.get(key) != theirs.get(key)]
    if differing:
        lines = [f"  {key}: {mine.get(key)!r} here, {theirs.get(key)!r} there" for key in differing]
        raise SettingsMismatch(
            f"this replica group's settings differ from those of {whose}; make them equal:\n"
            + "\n".join(lines)
        )


def adopt_changes(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a resume with those of its checkpoint.

    Returns:
        One phrase for each change that is adopted.

    Raises:
        SettingsMismatch: A setting has changed that the saved state does not allow to change.
    """
    keeps = ("model", *FIXED, *(["weight_by"] if mine.get("weight_by") in COUNTED else []))
    compare_fingerprints(
        {key: mine.get(key) for key in keeps},
        {key: saved.get(key) for key in keeps},
        "the checkpoint",
    )
    name = "outer_optimizer"
    if mine[name].partition("(")[0] != saved[name].partition("(")[0]:
        compare_fingerprints({name: mine[name]}, {name: saved[name]}, "the checkpoint")
    keys = sorted((mine.keys() | saved.keys()) - REMOVED.keys())
    return [
        f"{key}: {saved.get(key)!r} before, {mine.get(key)!r} now"
        for key in keys
        if mine.get(key) != saved.get(key)
    ]
