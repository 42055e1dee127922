"""The rows of the database tables of datasets, streams and leases."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from composer_replication.coordinator.database import RejectedError, StorageError

log = logging.getLogger(__name__)

MAX_UNITS = 2**24
"""Most units of a dataset: an epoch's order is computed in memory while other requests wait."""

NO_PLACE = -1
"""The ``place`` of a lease without samples, at which its stream pauses."""


class DatasetMismatch(RejectedError):
    """A dataset of this name exists with another length, seed, unit size or shuffling."""

    status = 409


class UnknownStream(RejectedError):
    """The state folder has no such stream, or not all of its leases.

    Args:
        stream: Key of the stream.
    """

    status = 404

    def __init__(self, stream: int) -> None:
        super().__init__(
            f"The coordinator does not have all leases of stream {stream}: it runs on another "
            "state folder than when they were given, or on an older copy. Start it on that folder."
        )


class StreamClosed(RejectedError):
    """The stream cannot continue. The group has to open a new one."""

    status = 410


class DatasetRow(NamedTuple):
    """A dataset: its name, samples, seed of the order, samples in a unit, and are they shuffled."""

    TABLE = "datasets"

    key: int
    dataset_id: str
    length: int
    seed: int
    unit_size: int
    shuffle: int

    @property
    def num_units(self) -> int:
        """The number of units, of which the last one may be shorter."""
        return -(-self.length // self.unit_size)

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are possible."""
        return min(self.length, self.unit_size) > 0 <= self.seed and self.num_units <= MAX_UNITS


class EpochRow(NamedTuple):
    """An epoch of a dataset, with its counts of samples."""

    TABLE = "epochs"

    key: int
    dataset: int
    epoch: int
    order_crc: int
    issued: int
    done: int
    leased: int
    trained_in_part: int
    trained_twice: int

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are possible."""
        return min(self) >= 0


class StreamRow(NamedTuple):
    """A stream: its owner, how many leases and samples it has, and how much is in the model."""

    TABLE = "streams"

    key: int
    name: str
    dataset: int
    replica_id: str
    session: str
    is_open: int
    leases: int
    samples: int
    position: int
    in_part: int

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are possible."""
        return 0 <= self.position <= self.in_part <= self.samples


class LeaseRow(NamedTuple):
    """A lease: samples ``[start, stop)`` of the unit at ``place`` in the epoch's order.

    The first of them is sample ``stream_start`` of the stream.
    """

    TABLE = "leases"

    stream: int
    number: int
    epoch: int
    place: int
    start: int
    stop: int
    stream_start: int

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are possible."""
        size = self.stop - self.start
        return min(self.start, self.stream_start) >= 0 and (
            size > 0 <= self.place or (size == 0 and self.place == NO_PLACE)
        )


class ReturnedRow(NamedTuple):
    """A range of a unit that was leased before and is available again."""

    TABLE = "returned"

    epoch: int
    place: int
    start: int
    stop: int

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are possible."""
        return min(self) >= 0 and self.start < self.stop


AnyRow = DatasetRow | EpochRow | StreamRow | LeaseRow | ReturnedRow
Row = TypeVar("Row", bound=AnyRow)

_TEXTS = {"dataset_id", "name", "replica_id", "session"}


def is_valid_row(row: AnyRow) -> bool:
    """Whether a row has the right types and possible values.

    A damaged row is logged. Callers leave it out.
    """
    kinds = (str if name in _TEXTS else int for name in row._fields)
    if all(type(value) is kind for value, kind in zip(row, kinds, strict=True)) and row.is_valid:
        return True
    log.warning("Skipping a damaged row of the coordinator's database: %s", row)
    return False


def read_rows(
    cursor: sqlite3.Cursor,
    kind: type[Row],
    condition: str,
    *parameters: Any,
) -> Iterator[Row]:
    """Yield the rows of a table that fulfil a condition. Damaged ones are logged and left out.

    Args:
        cursor: Not to be used for anything else until the last row that is wanted.
        kind: The row's class.
        condition: What follows ``WHERE``, and the order.
        *parameters: Of the condition.
    """
    cursor.execute(f"SELECT * FROM {kind.TABLE} WHERE {condition}", parameters)
    yield from filter(is_valid_row, map(kind._make, cursor))


def find_dataset(cursor: sqlite3.Cursor, dataset: str | int) -> DatasetRow:
    """Read a dataset by its name or its key.

    Raises:
        RejectedError: There is no dataset of this name.
        StorageError: The row is damaged, or there is no dataset of this key.
    """
    column = "dataset_id" if isinstance(dataset, str) else "key"
    row = cursor.execute(f"SELECT * FROM datasets WHERE {column} = ?", (dataset,)).fetchone()
    if row is None and isinstance(dataset, str):
        raise RejectedError(f"There is no dataset {dataset!r}: create it first.")
    if row is None or not is_valid_row(dataset_row := DatasetRow(*row)):
        raise StorageError(
            f"Dataset {dataset!r} is damaged in the coordinator's database: restore a copy of the "
            "file, or start with another state folder."
        )
    return dataset_row


def find_stream(cursor: sqlite3.Cursor, stream: int) -> StreamRow | None:
    """Read a stream by its key; None if there is none or its row is damaged."""
    return next(read_rows(cursor, StreamRow, "key = ?", stream), None)
