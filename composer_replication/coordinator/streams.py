"""Records which samples are in the model, and closes the sample streams of dead groups."""

from __future__ import annotations

from collections.abc import Collection

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.events import Events
from composer_replication.coordinator.registry import End, Registry
from composer_replication.coordinator.tables import StreamRow
from composer_replication.coordinator.work_units import LedgerRows, WorkUnits


class Streams:
    """The sample streams of the replica groups, and the outer step of the run.

    A dead group's stream is closed once a sync has committed without the group. Closing it earlier
    would lease samples to others that the group's last sync may still put into the model.

    A silent group may only be suspended, and releases its stream itself after it has taken over the
    others' state. So its stream is closed only when an epoch has no samples left except leased
    ones.

    Args:
        database: Holds all of this.
        registry: Knows which groups are dead.
        events: Receives samples that become available again.

    Attributes:
        units: The work units.
        outer_step: The largest outer step so far; after a rewind, that of the checkpoint. 0 before
            any. It may not be in the database yet.
    """

    def __init__(self, database: Database, registry: Registry, events: Events) -> None:
        self._database = database
        self._registry = registry
        self._events = events
        self.units = WorkUnits(database)
        self._newest: tuple[int, Collection[int]] = (0, ())
        """The newest outer step reported to this process, and the streams that took part in it."""
        rows = database.read("SELECT outer_step FROM outer_step")
        self._served_from = rows[0][0] if rows and type(rows[0][0]) is int else 0
        self.outer_step: int = self._served_from

    def observe_outer_step(self, outer_step: int) -> bool:
        """Record an outer step in memory.

        Returns:
            Whether it is new, so that ``store_outer_step`` has to store it.
        """
        is_new = outer_step > self.outer_step
        if is_new:
            self.outer_step = outer_step
        return is_new

    def store_outer_step(self) -> None:
        """Store the outer step: a run that has any must not start from nothing by accident."""
        with self._database.transaction() as cursor:
            cursor.execute("INSERT OR REPLACE INTO outer_step VALUES (1, ?)", (self.outer_step,))

    def commit(
        self,
        outer_step: int,
        ledger: LedgerRows,
        present: Collection[int],
        age_s: float,
    ) -> list[int]:
        """Record a sync.

        Args:
            outer_step: Outer step of the model after the sync.
            ledger: Ledger of that model.
            present: Streams of the groups that took part.
            age_s: Seconds since the sync ended.

        Returns:
            The streams of which the state folder has lost leases.
        """
        ended = self._registry.clock() - age_s
        with self._database.transaction():
            lost = self._commit(ledger)
            self.observe_outer_step(outer_step)
            self.store_outer_step()
            self._newest = max((outer_step, present), self._newest, key=lambda sync: sync[0])
            for stream in self.units.open_streams():
                if stream.key not in present:
                    end = self._registry.end_of(stream.replica_id, stream.session)
                    if end is not None and ended > end.at and self._is_needed(stream, end):
                        self._close(stream.key)
        return lost

    def release(self, stream: int, ledger: LedgerRows) -> list[int]:
        """Close a stream that its group no longer reads. A stream that was lost is closed already.

        Args:
            stream: Key of the stream.
            ledger: Ledger of the group's model.

        Returns:
            The streams of which the state folder has lost leases.
        """
        with self._database.transaction():
            lost = self._commit(ledger)
            self._close(stream)
        return lost

    def _commit(self, ledger: LedgerRows) -> list[int]:
        lost = self.units.commit(ledger)
        if lost:
            if self.units.gap is None:
                self._events.add(
                    f"the record of samples is complete up to outer step {self._served_from} only: "
                    "the model has samples whose leases this state folder does not have, and they "
                    "may be leased again"
                )
            self.units.widen_gap(self._served_from, sum(lost.values()))
        return list(lost)

    def rewind(self, outer_step: int, ledger: LedgerRows) -> None:
        """Continue the run from a checkpoint.

        Every group that resumes sends this request. One that arrives late changes nothing: by then
        a live group of the same start has taken part in a later outer step.

        Args:
            outer_step: Outer step of the checkpoint's model.
            ledger: Ledger of that model; see ``WorkUnits.rewind`` for what is undone.

        Raises:
            UnknownStream: The checkpoint has samples of leases of another state folder. Nothing
                changes then.
        """
        with self._database.transaction():
            if self._has_passed(outer_step):
                self._events.add(f"the run has already continued from outer step {outer_step}")
                return
            self.units.rewind(ledger)
            if outer_step != self.outer_step:
                self._events.add(
                    f"the run continues from outer step {outer_step}, not {self.outer_step}"
                )
            self.outer_step = outer_step
            self.store_outer_step()
            self._newest = outer_step, ()

    def _is_needed(self, stream: StreamRow, end: End) -> bool:
        """Whether others need a dead group's samples now, or it can never come back to them."""
        if end.is_certain:
            return True
        epochs = self.units.dataset(stream.dataset).epochs
        return any(epoch.available == 0 and epoch.leased > 0 for epoch in epochs)

    def _has_passed(self, outer_step: int) -> bool:
        """Whether a live group has taken part in an outer step after this one."""
        newest, present = self._newest
        return newest > outer_step and any(
            self._registry.end_of(stream.replica_id, stream.session) is None
            for stream in self.units.open_streams()
            if stream.key in present
        )

    def _close(self, stream: int) -> None:
        closed = self.units.close(stream)
        if closed is not None and closed.samples > closed.position:
            in_part = closed.in_part - closed.position
            part = f", {in_part} of them in part of the model" if in_part else ""
            self._events.add(
                f"{closed.samples - closed.position} uncommitted samples of replica group "
                f"{closed.replica_id} are available again{part}"
            )
