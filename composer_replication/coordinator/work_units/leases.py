"""Which samples a lease is of: the first that are available, in the shuffled order of an epoch."""

from __future__ import annotations

import sqlite3
import zlib
from functools import lru_cache

import numpy as np

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.wire_types import Lease
from composer_replication.coordinator.work_units.tables import (
    NO_PLACE,
    DatasetRow,
    EpochRow,
    LeaseRow,
    ReturnedRow,
    StreamClosed,
    StreamRow,
    understood,
)

_DAMAGED = (
    "Lease {} of stream {} is damaged in the coordinator's database, so the stream cannot go on: "
    "release it and open a new one."
)


@lru_cache(maxsize=4)
def unit_order(seed: int, epoch: int, num_units: int) -> tuple[np.ndarray, int]:
    """The order in which an epoch gives out its units, and a checksum of it."""
    order = np.random.default_rng([seed, epoch]).permutation(num_units).astype(np.uint32)
    order.setflags(write=False)
    return order, zlib.crc32(order.data)


def empty_lease(stream: StreamRow, number: int, epoch: int) -> Lease:
    """The answer to a group whose stream has been closed."""
    return Lease(number, epoch, 0, 0, 0, stream.samples, is_open=False)


def grant(cursor: sqlite3.Cursor, holder: StreamRow, dataset: DatasetRow, epoch: int) -> None:
    """Add a lease to an open stream; an empty one if no epoch up to this one has anything.

    Raises:
        StorageError: The epoch is damaged, or NumPy shuffles it otherwise than when it was begun.
    """
    asked = _begun(cursor, dataset, epoch)
    taken = _first_available(cursor, dataset, epoch)
    if taken is None:
        taken = ReturnedRow(asked.key, NO_PLACE, 0, 0)
    size = taken.stop - taken.start
    row = LeaseRow(holder.key, holder.leases, *taken, stream_start=holder.samples)
    try:
        cursor.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    except sqlite3.IntegrityError as error:
        raise StreamClosed(_DAMAGED.format(*row[1::-1])) from error
    cursor.execute("UPDATE epochs SET leased = leased + ? WHERE key = ?", (size, taken.epoch))
    cursor.execute(
        "UPDATE streams SET leases = leases + 1, samples = samples + ? WHERE key = ?",
        (size, holder.key),
    )


def given_lease(
    cursor: sqlite3.Cursor, holder: StreamRow, dataset: DatasetRow, number: int
) -> Lease:
    """A lease that has been granted.

    Raises:
        StreamClosed: Its row is damaged.
        StorageError: NumPy shuffles its epoch otherwise than when it was begun.
    """
    cursor.execute("SELECT * FROM leases WHERE stream = ? AND number = ?", (holder.key, number))
    fields = cursor.fetchone()
    if fields is not None and understood(row := LeaseRow(*fields)):
        cursor.execute("SELECT * FROM epochs WHERE key = ?", (row.epoch,))
        found = cursor.fetchone()
        if found is not None and understood(epoch := EpochRow(*found)):
            if row.place == NO_PLACE:
                return Lease(number, epoch.epoch, 0, 0, 0, row.stream_start)
            if row.place < dataset.num_units:
                unit = int(_order(dataset, epoch)[row.place])
                return Lease(number, epoch.epoch, unit, row.start, row.stop, row.stream_start)
    raise StreamClosed(_DAMAGED.format(number, holder.key))


def _begun(cursor: sqlite3.Cursor, dataset: DatasetRow, epoch: int) -> EpochRow:
    """The row of an epoch, which is there from now on."""
    wanted = (dataset.key, epoch)
    query = "SELECT * FROM epochs WHERE dataset = ? AND epoch = ?"
    row = cursor.execute(query, wanted).fetchone()
    if row is None:
        crc = unit_order(dataset.seed, epoch, dataset.num_units)[1]
        cursor.execute(
            "INSERT INTO epochs (dataset, epoch, order_crc) VALUES (?, ?, ?)", (*wanted, crc)
        )
        row = cursor.execute(query, wanted).fetchone()
    if not understood(found := EpochRow(*row)):
        raise StorageError(
            f"Epoch {epoch} of dataset {dataset.dataset_id!r} is damaged in the coordinator's "
            "database: put a copy of the file back, or begin with another state folder."
        )
    return found


def _first_available(
    cursor: sqlite3.Cursor, dataset: DatasetRow, last_epoch: int
) -> ReturnedRow | None:
    """Take what comes first in the earliest epoch that has anything."""
    rows = cursor.execute(
        "SELECT * FROM epochs WHERE dataset = ? AND epoch <= ? AND done + leased < ?"
        " ORDER BY epoch",
        (dataset.key, last_epoch, dataset.length),
    ).fetchall()
    for epoch in filter(understood, map(EpochRow._make, rows)):
        # What has come back is of units that were given out, so it is before all that were not.
        taken = _take_returned(cursor, epoch) or _take_next_unit(cursor, dataset, epoch)
        if taken is not None:
            return taken
    return None


def _take_returned(cursor: sqlite3.Cursor, epoch: EpochRow) -> ReturnedRow | None:
    cursor.execute("SELECT * FROM returned WHERE epoch = ? ORDER BY place, start", (epoch.key,))
    taken = next(filter(understood, map(ReturnedRow._make, cursor)), None)
    if taken is not None:
        cursor.execute(
            "DELETE FROM returned WHERE epoch = ? AND place = ? AND start = ?", taken[:3]
        )
    return taken


def _take_next_unit(
    cursor: sqlite3.Cursor, dataset: DatasetRow, epoch: EpochRow
) -> ReturnedRow | None:
    if epoch.issued >= dataset.num_units:
        return None
    first = int(_order(dataset, epoch)[epoch.issued]) * dataset.unit_size
    cursor.execute("UPDATE epochs SET issued = issued + 1 WHERE key = ?", (epoch.key,))
    return ReturnedRow(epoch.key, epoch.issued, 0, min(dataset.unit_size, dataset.length - first))


def _order(dataset: DatasetRow, epoch: EpochRow) -> np.ndarray:
    order, crc = unit_order(dataset.seed, epoch.epoch, dataset.num_units)
    if crc != epoch.order_crc:
        raise StorageError(
            f"NumPy {np.__version__} shuffles epoch {epoch.epoch} of dataset "
            f"{dataset.dataset_id!r} otherwise than when it was begun: run the coordinator with "
            "the NumPy it had then."
        )
    return order
