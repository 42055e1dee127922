"""Leases samples to streams: the first available ones in the shuffled order of an epoch."""

from __future__ import annotations

import sqlite3
import zlib
from functools import lru_cache

import numpy as np

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.wire_types import Lease
from composer_replication.coordinator.work_units.tables import (
    NO_RANK,
    DatasetRow,
    EpochRow,
    LeaseRow,
    ReturnedRow,
    StreamClosed,
    StreamRow,
    read_rows,
)

_DAMAGED = (
    "Lease {} of stream {} is damaged in the coordinator's database: release the stream and open a "
    "new one."
)


@lru_cache(maxsize=4)
def unit_order(seed: int, epoch: int, num_units: int) -> tuple[np.ndarray, int]:
    """The order in which an epoch leases its units, and a checksum of that order.

    Args:
        seed: Seed of the dataset.
        epoch: Number of the epoch.
        num_units: Number of units in the dataset.
    """
    order = np.random.default_rng([seed, epoch]).permutation(num_units).astype(np.uint32)
    order.setflags(write=False)
    return order, zlib.crc32(order.data)


def grant(cursor: sqlite3.Cursor, holder: StreamRow, dataset: DatasetRow, epoch: int) -> None:
    """Add a lease to an open stream. It is empty if no epoch up to this one has available samples.

    Args:
        cursor: Of a transaction.
        holder: The stream.
        dataset: The stream's dataset.
        epoch: Last epoch from which samples may be leased.

    Raises:
        StorageError: The epoch's row is damaged, or NumPy shuffles it differently than before.
        StreamClosed: A lease of this number exists, so the stream's row is damaged.
    """
    epoch_row = _find_or_begin_epoch(cursor, dataset, epoch)
    samples = _remove_first_available(cursor, dataset, epoch)
    if samples is None:
        samples = ReturnedRow(epoch_row.key, NO_RANK, 0, 0)
    size = samples.stop - samples.start
    row = LeaseRow(holder.key, holder.leases, *samples, stream_start=holder.samples)
    try:
        cursor.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    except sqlite3.IntegrityError as error:
        raise StreamClosed(_DAMAGED.format(*row[1::-1])) from error
    cursor.execute("UPDATE epochs SET leased = leased + ? WHERE key = ?", (size, samples.epoch))
    cursor.execute(
        "UPDATE streams SET leases = leases + 1, samples = samples + ? WHERE key = ?",
        (size, holder.key),
    )


def read_lease(
    cursor: sqlite3.Cursor, holder: StreamRow, dataset: DatasetRow, number: int
) -> Lease:
    """Read a lease that has been granted.

    Raises:
        StreamClosed: The row of the lease is damaged.
        StorageError: NumPy shuffles the epoch differently than when it began.
    """
    for row in list(read_rows(cursor, LeaseRow, "stream = ? AND number = ?", holder.key, number)):
        for epoch in read_rows(cursor, EpochRow, "key = ?", row.epoch):
            if row.epoch_rank == NO_RANK:
                return Lease(number, epoch.epoch, 0, 0, 0, row.stream_start)
            if row.epoch_rank < dataset.num_units:
                unit = int(_order(dataset, epoch)[row.epoch_rank])
                return Lease(number, epoch.epoch, unit, row.start, row.stop, row.stream_start)
    raise StreamClosed(_DAMAGED.format(number, holder.key))


def _find_or_begin_epoch(cursor: sqlite3.Cursor, dataset: DatasetRow, epoch: int) -> EpochRow:
    """Read the row of an epoch, and add it if the epoch has not begun."""
    _, crc = unit_order(dataset.seed, epoch, dataset.num_units)
    cursor.execute(
        "INSERT OR IGNORE INTO epochs (dataset, epoch, order_crc) VALUES (?, ?, ?)",
        (dataset.key, epoch, crc),
    )
    for row in read_rows(cursor, EpochRow, "dataset = ? AND epoch = ?", dataset.key, epoch):
        return row
    raise StorageError(
        f"Epoch {epoch} of dataset {dataset.dataset_id!r} is damaged in the coordinator's "
        "database: restore a copy of the file, or start with another state folder."
    )


def _remove_first_available(
    cursor: sqlite3.Cursor, dataset: DatasetRow, last_epoch: int
) -> ReturnedRow | None:
    """Remove the first available samples of the earliest epoch that has any, and return them."""
    which = "dataset = ? AND epoch <= ? AND done + leased < ? ORDER BY epoch"
    for epoch in list(read_rows(cursor, EpochRow, which, dataset.key, last_epoch, dataset.length)):
        # Returned samples are of units that were issued, so they come before all other units.
        samples = _remove_returned(cursor, epoch) or _issue_next_unit(cursor, dataset, epoch)
        if samples is not None:
            return samples
    return None


def _remove_returned(cursor: sqlite3.Cursor, epoch: EpochRow) -> ReturnedRow | None:
    free = read_rows(cursor, ReturnedRow, "epoch = ? ORDER BY place, start", epoch.key)
    samples = next(free, None)
    if samples is not None:
        cursor.execute(
            "DELETE FROM returned WHERE epoch = ? AND place = ? AND start = ?", samples[:3]
        )
    return samples


def _issue_next_unit(
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
            f"{dataset.dataset_id!r} differently than when it began: run the coordinator with "
            "the NumPy version that it had then."
        )
    return order
