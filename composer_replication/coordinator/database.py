"""The coordinator's SQLite database. What a call has answered is on the disk."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 4
"""Stored in the file. Every change of a table needs a new number."""

# Of work units: other tables name a stream, dataset or epoch by its integer key. The column `place`
# is a unit's rank in the shuffled order of its epoch. `issued` is the number of units of an epoch
# that have been leased at least once. `shuffle` is -1 if no group has said it since version 3.
SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (
    only INTEGER PRIMARY KEY CHECK (only = 1), settings TEXT NOT NULL, source TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS replicas (
    replica_id TEXT PRIMARY KEY, session TEXT NOT NULL, about TEXT NOT NULL,
    registrations INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS model_fingerprint (
    only INTEGER PRIMARY KEY CHECK (only = 1), fingerprint TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS outer_step (
    only INTEGER PRIMARY KEY CHECK (only = 1), outer_step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS datasets (
    key INTEGER PRIMARY KEY, dataset_id TEXT NOT NULL UNIQUE,
    length INTEGER NOT NULL, seed INTEGER NOT NULL, unit_size INTEGER NOT NULL,
    shuffle INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (
    key INTEGER PRIMARY KEY, dataset INTEGER NOT NULL, epoch INTEGER NOT NULL,
    order_crc INTEGER NOT NULL, issued INTEGER NOT NULL DEFAULT 0, done INTEGER NOT NULL DEFAULT 0,
    leased INTEGER NOT NULL DEFAULT 0, trained_in_part INTEGER NOT NULL DEFAULT 0,
    trained_twice INTEGER NOT NULL DEFAULT 0, UNIQUE (dataset, epoch));
CREATE TABLE IF NOT EXISTS streams (
    key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, dataset INTEGER NOT NULL,
    replica_id TEXT NOT NULL, session TEXT NOT NULL, is_open INTEGER NOT NULL DEFAULT 1,
    leases INTEGER NOT NULL DEFAULT 0, samples INTEGER NOT NULL DEFAULT 0,
    position INTEGER NOT NULL DEFAULT 0, in_part INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS streams_open ON streams (is_open) WHERE is_open;
CREATE TABLE IF NOT EXISTS leases (
    stream INTEGER, number INTEGER, epoch INTEGER, place INTEGER, start INTEGER, stop INTEGER,
    stream_start INTEGER, PRIMARY KEY (stream, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_of_unit ON leases (epoch, place);
CREATE TABLE IF NOT EXISTS returned (
    epoch INTEGER, place INTEGER, start INTEGER, stop INTEGER,
    PRIMARY KEY (epoch, place, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS gap (
    only INTEGER PRIMARY KEY CHECK (only = 1), outer_step INTEGER NOT NULL,
    samples INTEGER NOT NULL);
"""
"""The tables, which are made if they do not exist."""

BUSY_TIMEOUT_S = 5.0

FIXES = {
    sqlite3.SQLITE_FULL: "The disk is full: free some space and try again.",
    sqlite3.SQLITE_READONLY: "It cannot be written: make the file and its folder writable.",
    sqlite3.SQLITE_CANTOPEN: "It cannot be opened: create its folder and make it writable.",
    sqlite3.SQLITE_PERM: "It may not be opened: create its folder and make it writable.",
    sqlite3.SQLITE_IOERR: "The disk cannot be read or written: check its health and its quota.",
    sqlite3.SQLITE_NOTADB: "It is not a SQLite file: use another file.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: restore a copy of it, or use another file.",
    sqlite3.SQLITE_BUSY: "Another process is writing it: stop the second coordinator.",
}


class RejectedError(ValueError):
    """A replica group, or settings, that do not fit the run.

    Attributes:
        status: The HTTP status of an answer with this error's text.
    """

    status = 422


class StorageError(RuntimeError):
    """The database file cannot be read or written, or it has another schema version."""

    status = 507


class Database:
    """One SQLite file with one connection and one writer at a time, for any number of threads.

    A transaction is durable when its block ends: SQLite has synced it (WAL, ``synchronous=FULL``),
    so that the process may be killed at any moment. A transaction that failed changes nothing.

    Args:
        path: The file, which is created if it does not exist. Its folder has to exist.

    Raises:
        StorageError: Raised by every call: the disk is full, the folder cannot be written, or the
            file is damaged, not a SQLite file, or of another schema version.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        # Held for a whole transaction. Without it, two threads on the one connection would run
        # their statements in each other's transactions. Reentrant, since transactions nest.
        self._lock = threading.RLock()
        with self._explained():
            self._connection = sqlite3.connect(
                self._path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        try:
            with self._explained():
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = FULL")
            with self.transaction() as cursor:
                self._check_version(cursor)
                for statement in SCHEMA.split(";"):  # executescript would commit the transaction
                    cursor.execute(statement)
        except BaseException:
            self._connection.close()
            raise

    def _check_version(self, cursor: sqlite3.Cursor) -> None:
        version = cursor.execute("PRAGMA user_version").fetchone()[0]
        tables = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if version == 2:
            cursor.execute("ALTER TABLE streams DROP COLUMN at_lease")
        if version in (2, 3):
            cursor.execute("ALTER TABLE datasets ADD COLUMN shuffle INTEGER NOT NULL DEFAULT -1")
        elif version != SCHEMA_VERSION and (version or tables):
            raise StorageError(
                f"{self._path} has schema version {version}, this program has {SCHEMA_VERSION}: "
                "use the version of the program that wrote it, or another file."
            )
        cursor.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """Run a block as one transaction: when it ends, all of it is on the disk, or nothing is.

        Inside another transaction of the same thread, the block is a part of that one: durable at
        its end, and undone with it.

        Yields:
            A cursor.
        """
        with self._lock, self._explained():
            cursor = self._connection.cursor()
            if self._connection.in_transaction:
                yield cursor
                return
            cursor.execute("BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("COMMIT")
            except BaseException:
                # After some disk errors SQLite has ended the transaction itself.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def read(self, sql: str, *parameters: Any) -> list[Any]:
        """Return the rows that a statement selects, in a transaction of its own or around it."""
        with self.transaction() as cursor:
            return cursor.execute(sql, parameters).fetchall()

    def close(self) -> None:
        """Close the file, into which SQLite moves what is in the WAL. It may be repeated."""
        with self._lock, self._explained():
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite errors that the disk or the file causes into StorageError, with a fix."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            # The low byte is the kind of error. Errors of our own SQL are not in the table.
            fix = FIXES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
            if fix is None:
                raise
            raise StorageError(f"{self._path}: {error}. {fix}") from error
