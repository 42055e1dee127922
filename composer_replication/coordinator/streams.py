"""The streams of samples of replica groups: whose they are, and when they end."""

from __future__ import annotations

import sqlite3
from collections.abc import Set

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import Registry
from composer_replication.coordinator.work_units.tables import check_count
from composer_replication.coordinator.work_units.work_units import Ledger, WorkUnits

_SCHEMA = """
CREATE TABLE IF NOT EXISTS outer_step (
    only INTEGER PRIMARY KEY CHECK (only = 1), outer_step INTEGER NOT NULL
);
"""


class Streams:
    """Takes the reports of what is in the model, and ends the streams of groups that are dead.

    A group that missed a committed sync takes over the others' state before it takes part again,
    so nothing more of its stream gets into the model, and what did is in that sync's ledger. That
    is when the stream of a dead group ends: not before, for what it trained on may yet be synced.

    Args:
        database: Where all of it is kept.
        registry: Of the replica groups; it tells who is dead.
        journal: Told of samples that come back.
    """

    def __init__(self, database: Database, registry: Registry, journal: Journal) -> None:
        self._database = database
        self._registry = registry
        self._journal = journal
        self.units = WorkUnits(database)
        self._newest: tuple[int, Set[int]] = (0, set())
        """The last outer step that this process has heard of, and who took part in it."""
        self._heard = 0
        """The largest outer step in a heartbeat; it may not be in the database yet."""
        database.execute_schema(_SCHEMA)

    @property
    def outer_step(self) -> int:
        """The largest one reported; after a rewind, that of the checkpoint. 0 before any."""
        with self._database.transaction() as cursor:
            return max(self._heard, _read_outer_step(cursor))

    def hear_outer_step(self, outer_step: int) -> bool:
        """Take note of an outer step in memory; whether ``note_outer_step`` is to store it."""
        is_new = outer_step > self._heard
        self._heard = max(self._heard, outer_step)
        return is_new

    def note_outer_step(self, outer_step: int) -> None:
        """A group is there: a run that has made outer steps is not begun anew by accident."""
        with self._database.transaction() as cursor:
            if outer_step > _read_outer_step(cursor):
                _set_outer_step(cursor, outer_step)

    def commit(self, outer_step: int, ledger: Ledger, present: Set[int], age_s: float) -> list[int]:
        """Take the report of a sync.

        Args:
            outer_step: Of the model after it.
            ledger: Of that model.
            present: The streams of the groups that took part.
            age_s: How long ago it ended, in seconds.

        Returns:
            The streams in the ledger that are unknown.

        Raises:
            RefusedError: A stream has more than was leased; then nothing is noted at all.
        """
        check_count("outer_step", outer_step)
        ended = self._registry.clock() - age_s
        with self._database.transaction():
            unknown = self.units.commit(ledger)
            self.note_outer_step(outer_step)
            self._newest = max((outer_step, present), self._newest, key=lambda sync: sync[0])
            for stream in self.units.open_streams():
                if stream.stream not in present:
                    died = self._registry.death_of(stream.replica_id, stream.session)
                    if died is not None and ended > died:
                        self._close(stream.stream, stream.replica_id)
        return unknown

    def release(self, stream: int, ledger: Ledger) -> list[int]:
        """A group gives up its stream: it has ended, or has taken over the others' state.

        Args:
            stream: Its key.
            ledger: Of the model as the group has it.

        Returns:
            The streams in the ledger that are unknown.

        Raises:
            UnknownStream: There is no such stream.
            RefusedError: A stream has more than was leased; then nothing is noted at all.
        """
        with self._database.transaction():
            unknown = self.units.commit(ledger)
            self._close(stream, self.units.owner(stream))
        return unknown

    def rewind(self, outer_step: int, ledger: Ledger) -> None:
        """The run goes on from a checkpoint.

        Every group of a start says so. One that comes late with it changes nothing: a group of that
        start has taken part in a later outer step by then, and lives.

        Args:
            outer_step: Of its model.
            ledger: Of its model; see ``WorkUnits.rewind`` for what is undone.

        Raises:
            UnknownStream: The checkpoint has samples of a stream of another state folder.
            RefusedError: A stream has more than was leased; in either case nothing changes.
        """
        check_count("outer_step", outer_step)
        with self._database.transaction() as cursor:
            if self._has_gone_on_from(outer_step):
                self._journal.tell(f"the run has gone on from outer step {outer_step} already")
                return
            self.units.rewind(ledger)
            if outer_step != self.outer_step:
                self._journal.tell(
                    f"the run goes on from outer step {outer_step}, not {self.outer_step}"
                )
                _set_outer_step(cursor, outer_step)
            self._heard = 0
            self._newest = outer_step, set()

    def _has_gone_on_from(self, outer_step: int) -> bool:
        newest, present = self._newest
        return newest > outer_step and any(
            self._registry.death_of(stream.replica_id, stream.session) is None
            for stream in self.units.open_streams()
            if stream.stream in present
        )

    def _close(self, stream: int, replica_id: str) -> None:
        samples, in_part = self.units.close(stream)
        if samples:
            part = f", {in_part} of them in part of the model" if in_part else ""
            self._journal.tell(
                f"replica group {replica_id}'s samples come back: {samples} not committed{part}"
            )


def _read_outer_step(cursor: sqlite3.Cursor) -> int:
    row = cursor.execute("SELECT outer_step FROM outer_step").fetchone()
    return 0 if row is None or type(row[0]) is not int else row[0]


def _set_outer_step(cursor: sqlite3.Cursor, outer_step: int) -> None:
    cursor.execute("INSERT OR REPLACE INTO outer_step VALUES (1, ?)", (outer_step,))
