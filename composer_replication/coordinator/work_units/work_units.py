"""Work units: which samples of an epoch are done, which are leased, which are still to be had.

A stream of samples is its leases, one after the other. It *claims* those that are in the model
and, while it is open, those that are not. What nobody claims is available; what an open stream has
not yet in the model is leased; the rest is done.

How much of each stream is in the model is the model's own *ledger*: by stream, its ``position``
(samples that every fragment of the model has had) and ``in_part`` (samples that at least one has
had). It only grows, so reports of it may be repeated, get lost, or come in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.run_settings import RefusedError
from composer_replication.coordinator.work_units.accounting import (
    check_entry,
    count_available,
    move,
    move_to,
)
from composer_replication.coordinator.work_units.leases import (
    Lease,
    empty_lease,
    given_lease,
    grant,
)
from composer_replication.coordinator.work_units.progress import (
    DatasetProgress,
    EpochProgress,
    add_dataset,
    progress_of,
    progress_of_all,
)
from composer_replication.coordinator.work_units.streams import (
    OpenStream,
    add_stream,
    all_streams,
    find_stream,
    known_stream,
    open_streams,
)
from composer_replication.coordinator.work_units.tables import (
    SCHEMA,
    StreamClosed,
    UnknownStream,
    check_count,
    find_dataset,
)

Ledger = Mapping[int, tuple[int, int]]
"""By stream, the samples that are in the model, and those that are in some part of it."""


class Returned(NamedTuple):
    """Samples that came back when a stream ended; the second are some of the first."""

    samples: int
    in_part: int


class WorkUnits:
    """Leases of the samples of datasets to streams, tied to the ledger of the model.

    Every call is one transaction, durable when it returns, and may be repeated: a group that got
    no answer asks again. Calls from several threads wait for each other.

    Args:
        database: Where all of it is kept; this object has no state of its own.

    Raises:
        StorageError: From every call: the file cannot be read or written, or is damaged.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute_schema(SCHEMA)

    def create_dataset(self, dataset_id: str, length: int, seed: int, unit_size: int) -> None:
        """Make a dataset known; one that is known has to be the same.

        Args:
            dataset_id: Its name.
            length: Samples.
            seed: Of the order in which the units are given out.
            unit_size: Samples a unit; unit ``u`` begins at sample ``u * unit_size``.

        Raises:
            DatasetMismatch: It is known with another length, seed or unit size.
            RefusedError: A number is impossible, or there are more than 16,777,216 units.
        """
        check_count("length", length, least=1)
        check_count("seed", seed)
        check_count("unit_size", unit_size, least=1)
        with self._database.transaction() as cursor:
            add_dataset(cursor, dataset_id, length, seed, unit_size)

    def open_stream(self, name: str, dataset_id: str, replica_id: str, session: str) -> int:
        """Begin a stream of samples for one life of a replica group, and return its key.

        Args:
            name: Asked again with the same one, the answer is the same key.
            dataset_id: Of the samples.
            replica_id: The group.
            session: With which its owner is registered; who asks last is the owner.

        Raises:
            RefusedError: There is no such dataset, or the stream of this name is another's.
        """
        with self._database.transaction() as cursor:
            dataset = find_dataset(cursor, dataset_id)
            return add_stream(cursor, name, dataset, replica_id, session)

    def lease(self, stream: int, number: int, epoch: int) -> Lease:
        """The lease of this number in a stream, the same one whenever it is asked for.

        A new one is the first that is available in the earliest epoch that has anything: a range
        that has come back, or the next unit. With nothing available it is empty, and stays so:
        ask for the next number later. A closed stream gets no more than it has.

        Args:
            stream: Its key.
            number: 0, 1, 2, ...
            epoch: The last one that a new lease may be of; one that has been given keeps its own.

        Raises:
            UnknownStream: There is no such stream.
            StreamClosed: This lease is damaged.
            RefusedError: The number skips one.
        """
        check_count("number", number)
        check_count("epoch", epoch)
        with self._database.transaction() as cursor:
            holder = known_stream(cursor, stream)
            if number >= holder.leases and not holder.is_open:
                return empty_lease(holder, number, epoch)
            if number > holder.leases:
                raise RefusedError(
                    f"Stream {stream} has {holder.leases} leases, so the next one has number "
                    f"{holder.leases}, not {number}."
                )
            dataset = find_dataset(cursor, holder.dataset)
            if number == holder.leases:
                grant(cursor, holder, dataset, epoch)
            return given_lease(cursor, holder, dataset, number)

    def commit(self, ledger: Ledger) -> list[int]:
        """Note what the model has: the larger of what is known and what the ledger says.

        Of a stream that has been closed, samples that others have by now count as trained twice.

        Returns:
            The streams in the ledger that are unknown, in its order.

        Raises:
            RefusedError: A stream has more than was leased; then nothing is noted at all.
        """
        unknown = []
        with self._database.transaction() as cursor:
            for stream, entry in ledger.items():
                if (known := find_stream(cursor, stream)) is None:
                    unknown.append(stream)
                    continue
                check_entry(known, *entry)
                move_to(cursor, known, max(entry[0], known.position), max(entry[1], known.in_part))
        return unknown

    def close(self, stream: int) -> Returned:
        """The stream has ended: all of it that is not in the model comes back.

        Returns:
            What came back; nothing if it had been closed before.

        Raises:
            UnknownStream: There is no such stream.
        """
        with self._database.transaction() as cursor:
            known = known_stream(cursor, stream)
            if not known.is_open:
                return Returned(0, 0)
            move(cursor, known, known.position, known.in_part, is_open=0)
        return Returned(known.samples - known.position, known.in_part - known.position)

    def reopen(self, stream: int, position: int, session: str) -> None:
        """A group goes on in its own stream, from its own checkpoint.

        All that the stream had leased and that is not in the model is leased to it again: what
        comes before the position is in the group's local parameters, the rest will be trained on.

        Args:
            stream: Open or closed.
            position: Samples of the stream that the group has trained on.
            session: With which its owner is registered now.

        Raises:
            UnknownStream: There is no such stream.
            StreamClosed: Some of these samples are leased to others or done.
            RefusedError: The position is less than what is committed, or more than what is leased.
        """
        check_count("position", position)
        with self._database.transaction() as cursor:
            known = known_stream(cursor, stream)
            if not known.position <= position <= known.samples:
                raise RefusedError(
                    f"Stream {stream} cannot go on at position {position}: {known.position} "
                    f"samples are committed and {known.samples} leased. Rewind to the ledger of "
                    "the checkpoint first, or open a new stream."
                )
            wanted = known.samples - known.position
            if not known.is_open and (free := count_available(cursor, known)) < wanted:
                raise StreamClosed(
                    f"Stream {stream} has been closed, and {wanted - free} of the {wanted} "
                    "samples it had not committed are leased to others or done: open a new one."
                )
            move(cursor, known, known.position, known.in_part, is_open=1)
            cursor.execute("UPDATE streams SET session = ? WHERE key = ?", (session, stream))

    def rewind(self, ledger: Ledger) -> None:
        """The run goes on from a checkpoint: the model has what its ledger says, and no more.

        What is undone is available again if the stream is closed, and leased if it is open.

        Raises:
            UnknownStream: The checkpoint has samples of a stream of another state folder.
            RefusedError: A stream has more than was leased; in either case nothing changes.
        """
        with self._database.transaction() as cursor:
            for stream, entry in ledger.items():
                known = find_stream(cursor, stream)
                if known is not None:
                    check_entry(known, *entry)
                elif max(entry) > 0:
                    raise UnknownStream(stream)
            for known in all_streams(cursor):
                move_to(cursor, known, *ledger.get(known.key, (0, 0)))

    def owner(self, stream: int) -> str:
        """The replica group of a stream.

        Raises:
            UnknownStream: There is no such stream.
        """
        with self._database.transaction() as cursor:
            return known_stream(cursor, stream).replica_id

    def open_streams(self) -> list[OpenStream]:
        """The streams that are open, oldest first."""
        with self._database.transaction() as cursor:
            return open_streams(cursor)

    def progress(self, dataset_id: str) -> list[EpochProgress]:
        """How far each epoch that has been begun is; one that never was is not in the list.

        Raises:
            RefusedError: There is no such dataset.
        """
        return self.dataset(dataset_id).epochs

    def dataset(self, dataset_id: str) -> DatasetProgress:
        """A dataset and how far it is.

        Raises:
            RefusedError: There is no such dataset.
        """
        with self._database.transaction() as cursor:
            return progress_of(cursor, find_dataset(cursor, dataset_id))

    def datasets(self) -> list[DatasetProgress]:
        """All datasets, in the order in which they became known."""
        with self._database.transaction() as cursor:
            return progress_of_all(cursor)
