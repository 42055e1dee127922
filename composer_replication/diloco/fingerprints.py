"""Compares settings: of two groups, of a checkpoint and a resume, before and after a change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from composer_replication.diloco.arguments import REMOVED

FIXED = ("num_fragments", "fragment_patterns", "wire_format")
"""Settings that a resume cannot change: they define the fragments and the messages. Other groups
that resume have them from their checkpoints, and a message of another size would abort these groups
inside gloo before the settings could be compared."""

FIXED_WITH_BUFFERS = (*FIXED, "sync_buffers")
"""The same for a model of which ``sync_buffers`` decides what is synchronised."""

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
        both = [describe_difference(k, mine.get(k), theirs.get(k)) for k in differing]
        raise SettingsMismatch(
            f"this replica group's settings differ from those of {whose}, make them equal: "
            + "; ".join(both)
        )


def describe_difference(name: str, mine: Any, theirs: Any) -> str:
    """Describe two values that differ; of two models, the first of their tensors that does."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        name = min(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        mine, theirs = mine.get(name, "missing"), theirs.get(name, "missing")
    return f"{name}: {mine!r} here, {theirs!r} there"


def check_fixed(mine: Mapping[str, Any], saved: Mapping[str, Any], fixed: Collection[str]) -> None:
    """Check that a checkpoint was saved with the settings that a resume cannot change.

    Raises:
        SettingsMismatch: It was saved with others. The message has both values.
    """
    mine, saved = ({key: each.get(key) for key in fixed} for each in (mine, saved))
    compare_fingerprints(mine, saved, "the checkpoint")


def adopt_changes(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Compare the settings of a resume with those of its checkpoint.

    Returns:
        One phrase for each change that is adopted.

    Raises:
        SettingsMismatch: A setting has changed that the saved state does not allow to change.
    """
    is_counted = mine.get("weight_by") in COUNTED
    fixed = FIXED if mine["model"] == saved["model"] else (*FIXED_WITH_BUFFERS, "model")
    check_fixed(mine, saved, (*fixed, *(["weight_by"] if is_counted else [])))
    name = "outer_optimizer"
    if mine[name].partition("(")[0] != saved[name].partition("(")[0]:
        compare_fingerprints({name: mine[name]}, {name: saved[name]}, "the checkpoint")
    keys = sorted((mine.keys() | saved.keys()) - REMOVED.keys())
    return [
        f"{key}: {saved.get(key)!r} before, {mine.get(key)!r} now"
        for key in keys
        if mine.get(key) != saved.get(key)
    ]
