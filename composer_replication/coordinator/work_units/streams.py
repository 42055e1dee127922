"""The streams that the file knows."""

from __future__ import annotations

import secrets
import sqlite3
from typing import NamedTuple

from composer_replication.coordinator.run_settings import RefusedError
from composer_replication.coordinator.work_units.tables import (
    DatasetRow,
    StreamRow,
    UnknownStream,
    understood,
)


class OpenStream(NamedTuple):
    """A stream that may still be trained on, and who does."""

    stream: int
    dataset_id: str
    replica_id: str
    session: str


def find_stream(cursor: sqlite3.Cursor, stream: int) -> StreamRow | None:
    """A stream by its key, if it is known; a damaged one is not."""
    row = cursor.execute("SELECT * FROM streams WHERE key = ?", (stream,)).fetchone()
    return StreamRow(*row) if row is not None and understood(StreamRow(*row)) else None


def known_stream(cursor: sqlite3.Cursor, stream: int) -> StreamRow:
    """A stream by its key.

    Raises:
        UnknownStream: There is none.
    """
    if (found := find_stream(cursor, stream)) is None:
        raise UnknownStream(stream)
    return found


def add_stream(
    cursor: sqlite3.Cursor, name: str, dataset: DatasetRow, replica_id: str, session: str
) -> int:
    """The key of the stream of a name, which is made if it is not there.

    Raises:
        RefusedError: The stream of this name is another replica's, or of another dataset.
    """
    query = "SELECT key, dataset, replica_id FROM streams WHERE name = ?"
    known = cursor.execute(query, (name,)).fetchone()
    if known is None:
        # Not from 1 on: so a stream of another state folder is not taken for one of this.
        (newest,) = cursor.execute("SELECT max(key) FROM streams").fetchone()
        key = (secrets.randbelow(2**30) if newest is None else newest) + 1
        cursor.execute(
            "INSERT INTO streams (key, name, dataset, replica_id, session) VALUES (?, ?, ?, ?, ?)",
            (key, name, dataset.key, replica_id, session),
        )
        return key
    if known[1:] != (dataset.key, replica_id):
        raise RefusedError(
            f"Stream {name!r} is of replica {known[2]!r} or of another dataset, not of "
            f"{replica_id!r} and {dataset.dataset_id!r}: give every stream a name of its own."
        )
    cursor.execute("UPDATE streams SET session = ? WHERE key = ?", (session, known[0]))
    return known[0]


def all_streams(cursor: sqlite3.Cursor) -> list[StreamRow]:
    """Every stream, oldest first; without those that are damaged."""
    rows = cursor.execute("SELECT * FROM streams ORDER BY key").fetchall()
    return list(filter(understood, map(StreamRow._make, rows)))


def open_streams(cursor: sqlite3.Cursor) -> list[OpenStream]:
    """The streams that are open, oldest first."""
    rows = cursor.execute(
        "SELECT streams.key, dataset_id, replica_id, session FROM streams"
        " JOIN datasets ON datasets.key = dataset WHERE is_open ORDER BY streams.key"
    ).fetchall()
    return list(map(OpenStream._make, rows))
