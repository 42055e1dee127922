"""The coordinator's SQLite file: what a call has answered is on the disk."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCHEMA_VERSION = 1
"""Kept in the file; a change of any table needs another one."""

BUSY_TIMEOUT_S = 5.0

_WHAT_TO_DO = {
    sqlite3.SQLITE_FULL: "The disk is full: free some space and call again.",
    sqlite3.SQLITE_READONLY: "It cannot be written: make the file and its folder writable.",
    sqlite3.SQLITE_CANTOPEN: "Its folder has to exist and to be writable.",
    sqlite3.SQLITE_PERM: "Its folder has to exist and to be writable.",
    sqlite3.SQLITE_IOERR: "The disk does not read or write: look at its health and its quota.",
    sqlite3.SQLITE_NOTADB: "Something else has written this file: name another one.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: put a copy of it back, or name another one.",
    sqlite3.SQLITE_BUSY: "Another process is writing it: stop the second coordinator.",
}


class StorageError(RuntimeError):
    """The file cannot be read or written, or it is of another version."""


class Database:
    """One SQLite file, one connection, one writer at a time; for any number of threads.

    A transaction is durable when its block ends: SQLite has synced it (WAL, ``synchronous=FULL``),
    so the process may be killed at any moment. One that failed leaves nothing behind.

    Args:
        path: The file; created if it does not exist. Its folder has to exist.

    Raises:
        StorageError: From every call here: the disk is full, the folder cannot be written, the
            file is damaged, not of SQLite, or of another version of the schema.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._lock = threading.RLock()
        self._is_closed = False
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
        except BaseException:
            self._connection.close()
            raise

    def _check_version(self, cursor: sqlite3.Cursor) -> None:
        version = cursor.execute("PRAGMA user_version").fetchone()[0]
        tables = cursor.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if version == 0 and tables == 0:
            cursor.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            raise StorageError(
                f"{self._path} has schema version {version}, this program has {SCHEMA_VERSION}. "
                "Use the program that wrote it, or name another file."
            )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """Run a block as one transaction: all of it is on the disk when it ends, or nothing.

        Inside another one of the same thread the block is a part of that, durable at its end;
        an error still undoes just the inner block.
        """
        with self._lock, self._explained():
            if self._is_closed:
                raise StorageError(f"{self._path} has been closed: open it anew.")
            is_inner = self._connection.in_transaction
            cursor = self._connection.cursor()
            cursor.execute("SAVEPOINT part" if is_inner else "BEGIN IMMEDIATE")
            try:
                yield cursor
                cursor.execute("RELEASE part" if is_inner else "COMMIT")
            except BaseException:
                self._undo(is_inner)
                raise

    def _undo(self, is_inner: bool) -> None:
        # SQLite itself has already ended the transaction after some errors of the disk.
        if self._connection.in_transaction:
            if is_inner:
                self._connection.execute("ROLLBACK TO part")
                self._connection.execute("RELEASE part")
            else:
                self._connection.execute("ROLLBACK")

    def execute_schema(self, sql: str) -> None:
        """Run statements, separated by semicolons, in one transaction.

        Args:
            sql: To be run at every start: ``CREATE TABLE IF NOT EXISTS ...``.
        """
        # Not executescript: that would commit a transaction around this one.
        with self.transaction() as cursor:
            statement = ""
            for piece in sql.split(";"):
                statement += piece + ";"
                if sqlite3.complete_statement(statement):
                    cursor.execute(statement)
                    statement = ""

    def close(self) -> None:
        """Move what is in the WAL into the file itself, and close it; twice does no harm."""
        with self._lock, self._explained():
            if not self._is_closed:
                self._is_closed = True
                try:
                    self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                finally:
                    self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors that come of the disk or the file into StorageError."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            # The low byte is the kind; an error of our own SQL is not in the table.
            what_to_do = _WHAT_TO_DO.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
            if what_to_do is None:
                raise
            raise StorageError(f"{self._path}: {error}. {what_to_do}") from error
