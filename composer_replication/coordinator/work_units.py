"""Work units: which samples of an epoch are done, which are leased, and which are available.

A stream is the sequence of its leases. Every stream keeps the samples that are in the model; an
open stream also holds those that are not in the model yet, which are *leased*. A sample that no
stream keeps or holds is *available*. All others are *done*.

How much of each stream is in the model is recorded in the model's own *ledger*. It has two numbers
for each stream: ``position``, the samples that every fragment of the model has been trained on, and
``in_part``, the samples that at least one fragment has been trained on. Both only grow, so that
reports of the ledger may be repeated, get lost, or arrive in any order.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from composer_replication.coordinator.accounting import grant, read_lease, update_stream
from composer_replication.coordinator.database import Database, RejectedError
from composer_replication.coordinator.tables import (
    MAX_UNITS,
    DatasetMismatch,
    DatasetRow,
    EpochRow,
    StreamClosed,
    StreamRow,
    UnknownStream,
    find_dataset,
    find_stream,
    read_rows,
)
from composer_replication.coordinator.wire_types import Lease

LedgerRows = Iterable[Sequence[int]]
"""Of each stream: its key, the samples that are in the model, those in some part of the model."""


@dataclass(frozen=True)
class EpochProgress:
    """Samples of an epoch; ``done``, ``leased`` and ``available`` add up to ``length``.

    Attributes:
        epoch: Number of the epoch, from 0.
        length: Samples of the dataset.
        done: Samples that are in the model and not leased.
        leased: Samples that an open stream holds and that are not in the model.
        available: Samples that the next leases may have.
        trained_in_part: Samples that closed streams left in some fragments of the model only. They
            are trained on again.
        trained_twice: How often the model was trained on a sample again in the same epoch.
    """

    epoch: int
    length: int
    done: int
    leased: int
    available: int
    trained_in_part: int
    trained_twice: int


@dataclass(frozen=True)
class DatasetProgress:
    """A dataset and the progress of every epoch that has begun. All sizes are in samples."""

    dataset_id: str
    length: int
    seed: int
    unit_size: int
    epochs: list[EpochProgress]
    trained_in_part: int
    trained_twice: int


class WorkUnits:
    """Leases samples of datasets to streams, and records which of them are in the model.

    Every call is one transaction, which is durable when the call returns. Every call may be
    repeated: a group that received no answer sends its request again. Calls from several threads
    wait for each other.

    Args:
        database: The database. This object has no other state.

    Raises:
        StorageError: Raised by every call: the file cannot be read or written, or is damaged.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create_dataset(
        self,
        dataset_id: str,
        length: int,
        seed: int,
        unit_size: int,
        shuffle: bool = True,
    ) -> None:
        """Add a dataset. One that exists already has to be the same.

        Args:
            dataset_id: Name of the dataset.
            length: Number of samples.
            seed: Seed of the order in which units are leased.
            unit_size: Samples in a unit. Unit ``u`` begins at sample ``u * unit_size``.
            shuffle: Whether groups shuffle the samples of a unit.

        Raises:
            DatasetMismatch: The dataset exists with another length, seed, unit size or shuffling.
            RejectedError: There are more than 16,777,216 units.
        """
        if (num_units := -(-length // unit_size)) > MAX_UNITS:
            raise RejectedError(
                f"unit_size={unit_size} makes {num_units:,} units of {length:,} samples, and at "
                f"most {MAX_UNITS:,} are allowed: use a unit_size of "
                f"{-(-length // MAX_UNITS)} or more."
            )
        requested = {
            "length": length,
            "seed": seed,
            "unit_size": unit_size,
            "shuffle": int(shuffle),
        }
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO datasets (dataset_id, length, seed, unit_size, shuffle)"
                " VALUES (?, ?, ?, ?, ?) ON CONFLICT (dataset_id)"
                " DO UPDATE SET shuffle = excluded.shuffle WHERE shuffle = -1",
                (dataset_id, *requested.values()),
            )
            dataset = find_dataset(cursor, dataset_id)
        differing = [
            f"{name} {getattr(dataset, name)}, not {value}"
            for name, value in requested.items()
            if getattr(dataset, name) != value
        ]
        if differing:
            raise DatasetMismatch(
                f"Dataset {dataset_id!r} exists with {' and '.join(differing)}. "
                "Use the same values, or another dataset_id for other data."
            )

    def open_stream(self, name: str, dataset_id: str, replica_id: str, session: str) -> int:
        """Open a stream of samples for one incarnation of a replica group.

        Args:
            name: Name of the stream. A repeated call with the same name returns the same key.
            dataset_id: Name of the dataset.
            replica_id: The group.
            session: The session with which the group is registered. The last caller owns the
                stream.

        Returns:
            The key of the stream.

        Raises:
            RejectedError: There is no such dataset, or the stream of this name belongs to another
                group.
        """
        with self._database.transaction() as cursor:
            dataset = find_dataset(cursor, dataset_id)
            query = "SELECT key, dataset, replica_id FROM streams WHERE name = ?"
            row = cursor.execute(query, (name,)).fetchone()
            if row is None:
                # Keys are random, and grow. Otherwise a stream that another state folder, or a
                # newer copy of this one, has given to a group could be mistaken for one of this.
                (newest,) = cursor.execute("SELECT max(key) FROM streams").fetchone()
                key = (newest or 0) + secrets.randbelow(2**30 if newest is None else 2**20) + 1
                cursor.execute(
                    "INSERT INTO streams (key, name, dataset, replica_id, session)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (key, name, dataset.key, replica_id, session),
                )
                return key
            if row[1:] != (dataset.key, replica_id):
                raise RejectedError(
                    f"Stream {name!r} belongs to replica group {row[2]!r} or another dataset, not "
                    f"to {replica_id!r} and {dataset_id!r}: use another name for this stream."
                )
            cursor.execute("UPDATE streams SET session = ? WHERE key = ?", (session, row[0]))
            return row[0]

    def lease(self, stream: int, number: int, epoch: int) -> Lease:
        """Return a lease of a stream by its number. A repeated call returns the same lease.

        A new lease has the first available samples of the earliest epoch that has any: a range that
        was returned, or the next unit. If nothing is available, the lease is empty and stays so;
        the group asks for the next number later. A closed stream gets no new leases. Nor does one
        that has lost leases, or is lost itself, with a state folder: the group opens another one.

        Args:
            stream: Key of the stream.
            number: Number of the lease in the stream: 0, 1, 2, ...
            epoch: Last epoch of which a new lease may be. A lease that exists keeps its own.

        Raises:
            StreamClosed: The lease is damaged.
        """
        with self._database.transaction() as cursor:
            holder = find_stream(cursor, stream)
            if holder is None or number >= holder.leases + holder.is_open:
                samples = 0 if holder is None else holder.samples
                return Lease(number, epoch, 0, 0, 0, stream_start=samples, is_open=False)
            dataset = find_dataset(cursor, holder.dataset)
            if number == holder.leases:
                grant(cursor, holder, dataset, epoch)
            return read_lease(cursor, holder, dataset, number)

    def commit(self, ledger: LedgerRows) -> dict[int, int]:
        """Record what the model has been trained on, by the ledger of a sync.

        Of the known position and the reported one, the larger counts. Samples of a closed stream
        that other streams have got since count as trained twice.

        Args:
            ledger: The ledger of the model.

        Returns:
            By stream, how many samples the model has of leases that this database does not have.
        """
        with self._database.transaction() as cursor:
            rows, lost = _compare(cursor, ledger)
            for row, position, in_part in rows:
                update_stream(
                    cursor,
                    row,
                    position=max(position, row.position),
                    in_part=max(in_part, row.in_part),
                )
        return lost

    @property
    def gap(self) -> dict[str, int] | None:
        """What the record of trained samples lacks; None if it is complete.

        It is complete up to ``outer_step``. The model has been trained on ``samples`` of leases
        that were lost with the state folder, and that may be leased again.
        """
        rows = self._database.read("SELECT outer_step, samples FROM gap")
        return {"outer_step": rows[0][0], "samples": rows[0][1]} if rows else None

    def widen_gap(self, outer_step: int, samples: int) -> None:
        """Record that leases were lost.

        Args:
            outer_step: The record is complete up to it. A gap that exists keeps its own.
            samples: How many samples the model has of lost leases. The largest number counts.
        """
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO gap VALUES (1, ?, ?) ON CONFLICT (only)"
                " DO UPDATE SET samples = max(samples, excluded.samples)",
                (outer_step, samples),
            )

    def close(self, stream: int) -> StreamRow | None:
        """Close a stream. Its samples that are not in the model become available again.

        Args:
            stream: Key of the stream.

        Returns:
            The stream as it was; None if it was closed before, or there is none of this key.
        """
        with self._database.transaction() as cursor:
            row = find_stream(cursor, stream)
            if row is None or not row.is_open:
                return None
            update_stream(cursor, row, is_open=0)
        return row

    def reopen(self, stream: int, position: int, session: str) -> None:
        """Continue a stream from a checkpoint of the group that owns it.

        All its samples that are not in the model are leased to it again. Those before the position
        are in the group's local parameters; the group trains on the others. If the record has a
        gap, leases of the stream may be lost: the group then gets no further ones of it.

        Args:
            stream: Key of an open or closed stream.
            position: Samples of the stream that the group has trained on.
            session: The session with which the group is registered now.

        Raises:
            UnknownStream: There is no such stream.
            StreamClosed: Some of these samples are leased to other groups or done.
            RejectedError: The position is below what is committed or above what is leased.
        """
        with self._database.transaction() as cursor:
            row, has_gap = find_stream(cursor, stream), self.gap is not None
            if row is None:
                if has_gap:
                    return
                raise UnknownStream(stream)
            if has_gap:
                position = min(position, row.samples)
            if not row.position <= position <= row.samples:
                raise RejectedError(
                    f"Stream {stream} cannot continue at position {position}: {row.position} "
                    f"samples are committed and {row.samples} leased. Rewind to the ledger of "
                    "the checkpoint first, or open a new stream."
                )
            uncommitted = row.samples - row.position
            taken = update_stream(cursor, row, is_open=1, session=session)
            if not row.is_open and taken < uncommitted:  # the transaction undoes the change
                raise StreamClosed(
                    f"Stream {stream} has been closed, and {uncommitted - taken} of its "
                    f"{uncommitted} uncommitted samples are leased to others or done: open a new "
                    "stream."
                )

    def rewind(self, ledger: LedgerRows) -> None:
        """Continue the run from a checkpoint: the model has what this ledger says, and no more.

        Samples that are undone become available if their stream is closed, and leased if it is
        open.

        Args:
            ledger: The ledger of the checkpoint's model.

        Raises:
            UnknownStream: The checkpoint has samples of leases that this state folder does not
                have, and the record has no gap. Nothing changes then.
        """
        with self._database.transaction() as cursor:
            rows, lost = _compare(cursor, ledger)
            if lost and self.gap is None:
                raise UnknownStream(next(iter(lost)))
            known = {row.key: (position, in_part) for row, position, in_part in rows}
            for row in list(read_rows(cursor, StreamRow, "1 ORDER BY key")):
                position, in_part = known.get(row.key, (0, 0))
                update_stream(cursor, row, position=position, in_part=in_part)

    def open_streams(self) -> list[StreamRow]:
        """Return the open streams, oldest first."""
        with self._database.transaction() as cursor:
            return list(read_rows(cursor, StreamRow, "is_open ORDER BY key"))

    def dataset(self, dataset: str | int) -> DatasetProgress:
        """Return a dataset, by its name or its key, and its progress.

        Raises:
            RejectedError: There is no such dataset.
        """
        with self._database.transaction() as cursor:
            return _progress_of(cursor, find_dataset(cursor, dataset))

    def datasets(self) -> list[DatasetProgress]:
        """Return all datasets and their progress, in the order in which they were added."""
        with self._database.transaction() as cursor:
            found = list(read_rows(cursor, DatasetRow, "1 ORDER BY key"))
            return [_progress_of(cursor, dataset) for dataset in found]


def _compare(
    cursor: sqlite3.Cursor,
    ledger: LedgerRows,
) -> tuple[list[tuple[StreamRow, int, int]], dict[int, int]]:
    """Compare a ledger with the leases.

    Returns:
        The streams that the database has, with the part of their entries that it has leased; and
        by stream the number of samples beyond that.
    """
    rows, lost = [], {}
    for stream, position, in_part in ledger:
        row = find_stream(cursor, stream)
        leased = 0 if row is None else row.samples
        if in_part > leased:
            lost[stream] = in_part - leased
        if row is not None:
            rows.append((row, min(position, leased), min(in_part, leased)))
    return rows, lost


def _progress_of(cursor: sqlite3.Cursor, dataset: DatasetRow) -> DatasetProgress:
    epochs = [
        EpochProgress(
            row.epoch,
            dataset.length,
            row.done,
            row.leased,
            dataset.length - row.done - row.leased,
            row.trained_in_part,
            row.trained_twice,
        )
        for row in read_rows(cursor, EpochRow, "dataset = ? ORDER BY epoch", dataset.key)
    ]
    in_part = sum(epoch.trained_in_part for epoch in epochs)
    twice = sum(epoch.trained_twice for epoch in epochs)
    return DatasetProgress(*dataset[1:-1], epochs, in_part, twice)
