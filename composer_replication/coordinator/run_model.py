"""The model of a run: names, shapes and dtypes that are equal in all its replica groups."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from composer_replication.coordinator.run_settings import RejectedError

SCHEMA = """
CREATE TABLE IF NOT EXISTS model (only INTEGER PRIMARY KEY CHECK (only = 1), rows TEXT NOT NULL);
"""

ModelRow = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a tensor that is synchronized."""


def check_model(cursor: sqlite3.Cursor, model: Sequence[ModelRow]) -> None:
    """Compare a group's model with the run's, which is that of the first group.

    Args:
        cursor: Of a transaction.
        model: The tensors that the group synchronizes.

    Raises:
        RejectedError: The models differ. The message names the first difference.
    """
    rows = _sorted_rows(model)
    stored = cursor.execute("SELECT rows FROM model").fetchone()
    if stored is None:
        cursor.execute("INSERT INTO model VALUES (1, ?)", (json.dumps(rows),))
        return
    group = {name: (shape, dtype) for name, shape, dtype in rows}
    run = {name: (shape, dtype) for name, shape, dtype in json.loads(stored[0])}
    for name in sorted(group.keys() | run.keys()):
        if group.get(name) != run.get(name):
            raise RejectedError(
                f"another model: {name} is {_described(group.get(name))} in this group, and "
                f"{_described(run.get(name))} in this run. Use the run's model config"
            )


def find_fingerprint(cursor: sqlite3.Cursor) -> str | None:
    """The fingerprint of the run's model; None before the first group has registered."""
    stored = cursor.execute("SELECT rows FROM model").fetchone()
    return None if stored is None else fingerprint_of(json.loads(stored[0]))


def fingerprint_of(model: Sequence[ModelRow]) -> str:
    """A hash of a model with 16 hexadecimal digits. The order of the rows does not matter."""
    return hashlib.sha256(json.dumps(_sorted_rows(model)).encode()).hexdigest()[:16]


def _sorted_rows(model: Sequence[ModelRow]) -> list[list[Any]]:
    return [[name, list(shape), dtype] for name, shape, dtype in sorted(model)]


def _described(entry: tuple[list[int], str] | None) -> str:
    return "missing" if entry is None else f"{entry[1]} {tuple(entry[0])}"
