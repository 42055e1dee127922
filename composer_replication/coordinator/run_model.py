"""What a run trains: the names, shapes and dtypes that all its replica groups have in common."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from composer_replication.coordinator.run_settings import RefusedError

SCHEMA = """
CREATE TABLE IF NOT EXISTS model (only INTEGER PRIMARY KEY CHECK (only = 1), rows TEXT NOT NULL);
"""

ModelRow = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of what is synchronised."""


def check_model(cursor: sqlite3.Cursor, model: Sequence[ModelRow]) -> None:
    """Compare a group's model with the run's, which is that of the first group.

    Raises:
        RefusedError: It is another one; the message names the first difference.
    """
    rows = _sorted_rows(model)
    known = cursor.execute("SELECT rows FROM model").fetchone()
    if known is None:
        cursor.execute("INSERT INTO model VALUES (1, ?)", (json.dumps(rows),))
        return
    here = {name: (shape, dtype) for name, shape, dtype in rows}
    run = {name: (shape, dtype) for name, shape, dtype in json.loads(known[0])}
    for name in sorted(here.keys() | run.keys()):
        if here.get(name) != run.get(name):
            raise RefusedError(
                f"another model: {name} is {_described(here.get(name))} here, and "
                f"{_described(run.get(name))} in this run"
            )


def find_fingerprint(cursor: sqlite3.Cursor) -> str | None:
    """``fingerprint_of`` the run's model; None before the first group has registered."""
    known = cursor.execute("SELECT rows FROM model").fetchone()
    return None if known is None else fingerprint_of(json.loads(known[0]))


def fingerprint_of(model: Sequence[ModelRow]) -> str:
    """16 hexadecimal digits that another model does not have, in whatever order its rows are."""
    return hashlib.sha256(json.dumps(_sorted_rows(model)).encode()).hexdigest()[:16]


def _sorted_rows(model: Sequence[ModelRow]) -> list[list[Any]]:
    return [[name, list(shape), dtype] for name, shape, dtype in sorted(model)]


def _described(entry: tuple[list[int], str] | None) -> str:
    return "missing" if entry is None else f"{entry[1]} {tuple(entry[0])}"
