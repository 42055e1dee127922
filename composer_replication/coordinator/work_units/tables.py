"""The tables of datasets, streams and leases, and what a row has to be to be believed."""

from __future__ import annotations

import logging
import sqlite3
from typing import NamedTuple

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.run_settings import RefusedError

log = logging.getLogger(__name__)

# A stream, dataset or epoch is its integer key in other tables. A `place` is a unit's rank in the
# order of its epoch; `issued` is the number of places that have been leased at least once. All
# leases of a stream before number `at_lease` are committed as a whole, all after it not at all.
SCHEMA = """
CREATE TABLE IF NOT EXISTS datasets (
    key INTEGER PRIMARY KEY, dataset_id TEXT NOT NULL UNIQUE,
    length INTEGER NOT NULL, seed INTEGER NOT NULL, unit_size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (
    key INTEGER PRIMARY KEY, dataset INTEGER NOT NULL, epoch INTEGER NOT NULL,
    order_crc INTEGER NOT NULL, issued INTEGER NOT NULL DEFAULT 0, done INTEGER NOT NULL DEFAULT 0,
    leased INTEGER NOT NULL DEFAULT 0, trained_in_part INTEGER NOT NULL DEFAULT 0,
    trained_twice INTEGER NOT NULL DEFAULT 0, UNIQUE (dataset, epoch));
CREATE TABLE IF NOT EXISTS streams (
    key INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, dataset INTEGER NOT NULL,
    replica_id TEXT NOT NULL, session TEXT NOT NULL, is_open INTEGER NOT NULL DEFAULT 1,
    leases INTEGER NOT NULL DEFAULT 0, samples INTEGER NOT NULL DEFAULT 0,
    position INTEGER NOT NULL DEFAULT 0, in_part INTEGER NOT NULL DEFAULT 0,
    at_lease INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS streams_open ON streams (is_open) WHERE is_open;
CREATE TABLE IF NOT EXISTS leases (
    stream INTEGER, number INTEGER, epoch INTEGER, place INTEGER, start INTEGER, stop INTEGER,
    stream_start INTEGER, PRIMARY KEY (stream, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leases_of_unit ON leases (epoch, place);
CREATE TABLE IF NOT EXISTS returned (
    epoch INTEGER, place INTEGER, start INTEGER, stop INTEGER,
    PRIMARY KEY (epoch, place, start)) WITHOUT ROWID;
"""

MAX_UNITS = 2**24
"""Units a dataset may have: the order of an epoch is made in memory, while others wait."""

NO_PLACE = -1
"""The place of an empty lease."""


class DatasetMismatch(RefusedError):
    """A dataset of this name exists with another length, seed or unit size."""


class UnknownStream(RefusedError):
    """There is no such stream in this state folder."""

    def __init__(self, stream: int) -> None:
        super().__init__(
            f"The coordinator does not know stream {stream}: it runs on another state folder than "
            "when the stream was opened. Start it with the right one."
        )


class StreamClosed(RefusedError):
    """The stream cannot go on: the group has to open a new one."""


class DatasetRow(NamedTuple):
    key: int
    dataset_id: str
    length: int
    seed: int
    unit_size: int

    @property
    def num_units(self) -> int:
        return -(-self.length // self.unit_size)

    @property
    def is_sane(self) -> bool:
        return min(self.length, self.unit_size) > 0 <= self.seed and self.num_units <= MAX_UNITS


class EpochRow(NamedTuple):
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
    def is_sane(self) -> bool:
        return min(self) >= 0


class StreamRow(NamedTuple):
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
    at_lease: int

    @property
    def is_sane(self) -> bool:
        return 0 <= self.position <= self.in_part <= self.samples and 0 <= self.at_lease


class LeaseRow(NamedTuple):
    stream: int
    number: int
    epoch: int
    place: int
    start: int
    stop: int
    stream_start: int

    @property
    def is_sane(self) -> bool:
        size = self.stop - self.start
        return min(self.start, self.stream_start) >= 0 and (
            size > 0 <= self.place or (size == 0 and self.place == NO_PLACE)
        )


class ReturnedRow(NamedTuple):
    epoch: int
    place: int
    start: int
    stop: int

    @property
    def is_sane(self) -> bool:
        return min(self) >= 0 and self.start < self.stop


_TEXTS = {"dataset_id", "name", "replica_id", "session"}


def understood(row: DatasetRow | EpochRow | StreamRow | LeaseRow | ReturnedRow) -> bool:
    """Whether a row of the file makes sense; warns of one that does not, which is left out."""
    kinds = (str if name in _TEXTS else int for name in row._fields)
    if all(type(value) is kind for value, kind in zip(row, kinds, strict=True)) and row.is_sane:
        return True
    log.warning("Skipping a damaged row of the coordinator's database: %s", row)
    return False


def find_dataset(cursor: sqlite3.Cursor, dataset: str | int) -> DatasetRow:
    """A dataset by its name, or by its key.

    Raises:
        RefusedError: There is none of this name.
        StorageError: Its row is damaged, or there is none of this key.
    """
    column = "dataset_id" if isinstance(dataset, str) else "key"
    row = cursor.execute(f"SELECT * FROM datasets WHERE {column} = ?", (dataset,)).fetchone()
    if row is None and isinstance(dataset, str):
        raise RefusedError(f"There is no dataset {dataset!r}: create it first.")
    if row is None or not understood(found := DatasetRow(*row)):
        raise StorageError(
            f"Dataset {dataset!r} is damaged in the coordinator's database: put a copy of the "
            "file back, or begin with another state folder."
        )
    return found


def check_count(name: str, value: int, least: int = 0) -> None:
    """Refuse what is no whole number, or too small or too large for the file.

    Raises:
        RefusedError: It is none.
    """
    if not isinstance(value, int) or not least <= value < 2**63:
        raise RefusedError(f"{name} has to be a whole number from {least} on, not {value!r}.")
