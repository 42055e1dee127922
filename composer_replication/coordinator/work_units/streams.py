"""Reads and adds the streams in the database."""

from __future__ import annotations

import secrets
import sqlite3
from typing import NamedTuple

from composer_replication.coordinator.run_settings import RejectedError
from composer_replication.coordinator.work_units.tables import (
    DatasetRow,
    StreamRow,
    UnknownStream,
    is_valid_row,
)


class OpenStream(NamedTuple):
    """A stream that a group may still train on, and its owner.

    Attributes:
        stream: Key of the stream.
        dataset_id: Name of its dataset.
        replica_id: The group that owns it.
        session: The session with which that group is registered.
    """

    stream: int
    dataset_id: str
    replica_id: str
    session: str


def find_stream(cursor: sqlite3.Cursor, stream: int) -> StreamRow | None:
    """Read a stream by its key; None if there is none or its row is damaged."""
    row = cursor.execute("SELECT * FROM streams WHERE key = ?", (stream,)).fetchone()
    return StreamRow(*row) if row is not None and is_valid_row(StreamRow(*row)) else None


def get_stream(cursor: sqlite3.Cursor, stream: int) -> StreamRow:
    """Read a stream by its key.

    Raises:
        UnknownStream: There is no such stream.
    """
    if (row := find_stream(cursor, stream)) is None:
        raise UnknownStream(stream)
    return row


def add_stream(
    cursor: sqlite3.Cursor, name: str, dataset: DatasetRow, replica_id: str, session: str
) -> int:
    """Return the key of the stream with a name, and add the stream if there is none.

    Raises:
        RejectedError: The stream of this name belongs to another group or dataset.
    """
    query = "SELECT key, dataset, replica_id FROM streams WHERE name = ?"
    row = cursor.execute(query, (name,)).fetchone()
    if row is None:
        # The first key is random. With 1, a checkpoint's stream of another state folder could be
        # mistaken for a stream of this one.
        (newest,) = cursor.execute("SELECT max(key) FROM streams").fetchone()
        key = (secrets.randbelow(2**30) if newest is None else newest) + 1
        cursor.execute(
            "INSERT INTO streams (key, name, dataset, replica_id, session) VALUES (?, ?, ?, ?, ?)",
            (key, name, dataset.key, replica_id, session),
        )
        return key
    if row[1:] != (dataset.key, replica_id):
        raise RejectedError(
            f"Stream {name!r} belongs to replica group {row[2]!r} or another dataset, not to "
            f"{replica_id!r} and {dataset.dataset_id!r}: use another name for this stream."
        )
    cursor.execute("UPDATE streams SET session = ? WHERE key = ?", (session, row[0]))
    return row[0]


def all_streams(cursor: sqlite3.Cursor) -> list[StreamRow]:
    """All streams, oldest first. Damaged rows are left out."""
    rows = cursor.execute("SELECT * FROM streams ORDER BY key").fetchall()
    return list(filter(is_valid_row, map(StreamRow._make, rows)))


def open_streams(cursor: sqlite3.Cursor) -> list[OpenStream]:
    """The open streams, oldest first."""
    rows = cursor.execute(
        "SELECT streams.key, dataset_id, replica_id, session FROM streams"
        " JOIN datasets ON datasets.key = dataset WHERE is_open ORDER BY streams.key"
    ).fetchall()
    return list(map(OpenStream._make, rows))
