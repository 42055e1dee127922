"""Leases samples to streams, and keeps the available ranges and the counts of their epochs.

A lease has the first available samples in the shuffled order of an epoch. Ranges and counts follow
from the leases, the positions and which streams are open. ``update_stream`` changes one stream and
recounts every unit that it touches. For one unit and one lease of it::

    lease.start              committed                lease.stop
        |---- in the model ------|---- leased ------------|      stream open
        |---- in the model ------|---- available ---------|      stream closed
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.tables import (
    NO_RANK,
    DatasetRow,
    EpochRow,
    LeaseRow,
    ReturnedRow,
    StreamClosed,
    StreamRow,
    is_valid_row,
    read_rows,
)
from composer_replication.coordinator.wire_types import Lease

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
        returned = read_rows(cursor, ReturnedRow, "epoch = ? ORDER BY place, start", epoch.key)
        if (samples := next(returned, None)) is not None:
            of_row = "epoch = ? AND place = ? AND start = ?"
            cursor.execute(f"DELETE FROM returned WHERE {of_row}", samples[:3])
            return samples
        if (rank := epoch.issued) < dataset.num_units:
            cursor.execute("UPDATE epochs SET issued = issued + 1 WHERE key = ?", (epoch.key,))
            first = int(_order(dataset, epoch)[rank]) * dataset.unit_size
            return ReturnedRow(epoch.key, rank, 0, min(dataset.unit_size, dataset.length - first))
    return None


def _order(dataset: DatasetRow, epoch: EpochRow) -> np.ndarray:
    order, crc = unit_order(dataset.seed, epoch.epoch, dataset.num_units)
    if crc != epoch.order_crc:
        raise StorageError(
            f"NumPy {np.__version__} shuffles epoch {epoch.epoch} of dataset "
            f"{dataset.dataset_id!r} differently than when it began: run the coordinator with "
            "the NumPy version that it had then."
        )
    return order


# ---- ranges and counts ------------------------------------------------------------------------


class Interval(NamedTuple):
    """What a stream has of a unit, in the unit's own order.

    Attributes:
        start: First sample of the lease.
        committed: First sample that is not in the model.
        stop: First sample that the stream neither has in the model nor holds as a lease.
        in_part: Of a closed stream, the first sample that is in no part of the model; else
            ``committed``.
    """

    start: int
    committed: int
    stop: int
    in_part: int


def update_stream(cursor: sqlite3.Cursor, stream: StreamRow, **changes: Any) -> int:
    """Change how much of a stream is in the model, or whether the stream is open; not both.

    Args:
        cursor: Of a transaction.
        stream: The stream as the database has it.
        **changes: Columns of the stream and their values.

    Returns:
        How many samples are no longer available; negative if some have become so.
    """
    updated = stream._replace(**changes)
    if updated == stream:
        return 0
    low, high = min(stream.position, updated.position), max(stream.in_part, updated.in_part)
    if updated.is_open != stream.is_open:
        high = stream.samples
    # A rewind has to look at all leases before the position.
    first = stream.at_lease if low == stream.position else 0
    within = (
        "stream = ? AND number >= ? AND stream_start < ? AND stream_start + stop - start > ?"
        " ORDER BY number"
    )
    leases = list(read_rows(cursor, LeaseRow, within, stream.key, first, high, low))
    begun = (lease.number for lease in leases if lease.stream_start <= updated.position)
    updated = updated._replace(at_lease=max(begun, default=first))
    units = dict.fromkeys((lease.epoch, lease.epoch_rank) for lease in leases)
    taken = sum(_recount_unit(cursor, *unit, updated) for unit in units)
    cursor.execute(
        "UPDATE streams SET session = :session, is_open = :is_open, position = :position,"
        " in_part = :in_part, at_lease = :at_lease WHERE key = :key",
        updated._asdict(),
    )
    return taken


def _recount_unit(cursor: sqlite3.Cursor, epoch: int, epoch_rank: int, updated: StreamRow) -> int:
    """Update the available ranges and the counts of a unit for a change of one stream.

    Returns:
        How many samples of the unit are no longer available.
    """
    before, after = _intervals_of_unit(cursor, epoch, epoch_rank, updated)
    of_unit = "epoch = ? AND place = ? ORDER BY start"
    old_rows = read_rows(cursor, ReturnedRow, of_unit, epoch, epoch_rank)
    old_ranges = [(row.start, row.stop) for row in old_rows]
    ranges: list[tuple[int, int]] = []
    change = [0, 0, 0, 0]
    # Between two neighbouring edges all samples of the unit are in the same state.
    for start, stop in pairwise(sorted({e for c in (*before, *after, *old_ranges) for e in c})):
        was, now = _counts(before, start), _counts(after, start)
        change = [c + (stop - start) * (n - w) for c, n, w in zip(change, now, was, strict=True)]
        is_free = any(a <= start < b for a, b in old_ranges)
        # Where nothing changes the old ranges stay as they are: a damaged lease frees nothing.
        if any(was[:2]) != any(now[:2]):
            is_free = not any(now[:2])
        if is_free:
            merged = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((merged, stop))
    if ranges != old_ranges:
        cursor.execute("DELETE FROM returned WHERE epoch = ? AND place = ?", (epoch, epoch_rank))
        rows = [(epoch, epoch_rank, *free) for free in ranges]
        cursor.executemany("INSERT INTO returned VALUES (?, ?, ?, ?)", rows)
    cursor.execute(
        "UPDATE epochs SET done = done + ?, leased = leased + ?,"
        " trained_in_part = trained_in_part + ?, trained_twice = trained_twice + ? WHERE key = ?",
        (*change, epoch),
    )
    return change[0] + change[1]


def _counts(intervals: Sequence[Interval], sample: int) -> tuple[int, int, int, int]:
    """What a sample adds to its epoch's done, leased, trained_in_part and trained_twice.

    It is available if it adds nothing to the first two.
    """
    held = sum(interval.committed <= sample < interval.stop for interval in intervals)
    done = sum(interval.start <= sample < interval.committed for interval in intervals)
    in_part = sum(interval.committed <= sample < interval.in_part for interval in intervals)
    return int(done > 0 and held == 0), int(held > 0), in_part, max(0, done + held - 1)


def _intervals_of_unit(
    cursor: sqlite3.Cursor, epoch: int, epoch_rank: int, updated: StreamRow
) -> tuple[list[Interval], list[Interval]]:
    """The intervals of all leases of a unit, before and after a change of one stream."""
    cursor.execute(
        "SELECT leases.*, streams.* FROM leases JOIN streams ON streams.key = leases.stream"
        " WHERE epoch = ? AND place = ?",
        (epoch, epoch_rank),
    )
    before, after = [], []
    num_columns = len(LeaseRow._fields)
    for row in cursor.fetchall():
        lease, stream = LeaseRow(*row[:num_columns]), StreamRow(*row[num_columns:])
        if is_valid_row(lease) and is_valid_row(stream):
            before.append(_interval(lease, stream))
            after.append(_interval(lease, updated if stream.key == updated.key else stream))
    return before, after


def _interval(lease: LeaseRow, stream: StreamRow) -> Interval:
    """What a stream has of a lease's unit."""
    committed, in_part = (
        lease.start + min(max(count - lease.stream_start, 0), lease.stop - lease.start)
        for count in (stream.position, stream.in_part)
    )
    if stream.is_open:
        return Interval(lease.start, committed, lease.stop, committed)
    return Interval(lease.start, committed, committed, in_part)
