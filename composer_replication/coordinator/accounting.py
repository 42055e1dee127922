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
from itertools import takewhile
from typing import Any

import numpy as np

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.tables import (
    NO_PLACE,
    DatasetRow,
    EpochRow,
    LeaseRow,
    ReturnedRow,
    StreamClosed,
    StreamRow,
    find_stream,
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
    _, crc = unit_order(dataset.seed, epoch, dataset.num_units)
    cursor.execute(
        "INSERT OR IGNORE INTO epochs (dataset, epoch, order_crc) VALUES (?, ?, ?)",
        (dataset.key, epoch, crc),
    )
    samples = _remove_first_available(cursor, dataset, epoch)
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
    cursor: sqlite3.Cursor,
    holder: StreamRow,
    dataset: DatasetRow,
    number: int,
) -> Lease:
    """Read a lease that has been granted.

    Raises:
        StreamClosed: The row of the lease is damaged.
        StorageError: NumPy shuffles the epoch differently than when it began.
    """
    for row in list(read_rows(cursor, LeaseRow, "stream = ? AND number = ?", holder.key, number)):
        for epoch in read_rows(cursor, EpochRow, "key = ?", row.epoch):
            if row.place < dataset.num_units:
                unit = _unit_at(row.place, dataset, epoch) if row.stop else 0
                return Lease(number, epoch.epoch, unit, row.start, row.stop, row.stream_start)
    raise StreamClosed(_DAMAGED.format(number, holder.key))


def _remove_first_available(
    cursor: sqlite3.Cursor,
    dataset: DatasetRow,
    last_epoch: int,
) -> ReturnedRow:
    """Remove the first available samples of the earliest epoch that has any, and return them.

    They are none of the last epoch if no epoch has any.
    """
    which = "dataset = ? AND epoch <= ? AND (done + leased < ? OR epoch = ?) ORDER BY epoch"
    limits = dataset.key, last_epoch, dataset.length, last_epoch
    epochs = list(read_rows(cursor, EpochRow, which, *limits))
    for epoch in epochs:
        # Returned samples are of units that were issued, so they come before all other units.
        returned = read_rows(cursor, ReturnedRow, "epoch = ? ORDER BY place, start", epoch.key)
        if (samples := next(returned, None)) is not None:
            of_row = "epoch = ? AND place = ? AND start = ?"
            cursor.execute(f"DELETE FROM returned WHERE {of_row}", samples[:3])
            return samples
        if (place := epoch.issued) < dataset.num_units:
            cursor.execute("UPDATE epochs SET issued = issued + 1 WHERE key = ?", (epoch.key,))
            rest = dataset.length - _unit_at(place, dataset, epoch) * dataset.unit_size
            return ReturnedRow(epoch.key, place, 0, min(dataset.unit_size, rest))
    if not epochs or epochs[-1].epoch < last_epoch:
        raise StorageError(
            f"Epoch {last_epoch} of dataset {dataset.dataset_id!r} is damaged in the "
            "coordinator's database: restore a copy of the file, or start with another state "
            "folder."
        )
    return ReturnedRow(epochs[-1].key, NO_PLACE, 0, 0)


def _unit_at(place: int, dataset: DatasetRow, epoch: EpochRow) -> int:
    order, crc = unit_order(dataset.seed, epoch.epoch, dataset.num_units)
    if crc != epoch.order_crc:
        raise StorageError(
            f"NumPy {np.__version__} shuffles epoch {epoch.epoch} of dataset "
            f"{dataset.dataset_id!r} differently than when it began: run the coordinator with "
            "the NumPy version that it had then."
        )
    return int(order[place])


# ---- ranges and counts ------------------------------------------------------------------------


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
    first, end = min(stream.position, updated.position), max(stream.in_part, updated.in_part)
    if updated.is_open != stream.is_open:
        end = stream.samples
    # The newest leases come first: all before the first one that has not changed are in the model.
    which = "stream = ? AND place >= 0 AND stream_start < ? ORDER BY number DESC"
    changed = takewhile(
        lambda lease: lease.stream_start + lease.stop - lease.start > first,
        read_rows(cursor, LeaseRow, which, stream.key, end),
    )
    units = dict.fromkeys((lease.epoch, lease.place) for lease in changed)
    taken = sum(_recount_unit(cursor, *unit, updated) for unit in units)
    cursor.execute(
        "UPDATE streams SET session = :session, is_open = :is_open, position = :position,"
        " in_part = :in_part WHERE key = :key",
        updated._asdict(),
    )
    return taken


def _recount_unit(cursor: sqlite3.Cursor, epoch: int, place: int, updated: StreamRow) -> int:
    """Update the available ranges and the counts of a unit for a change of one stream.

    Returns:
        How many samples of the unit are no longer available.
    """
    of_unit = "epoch = ? AND place = ?"
    leases = list(read_rows(cursor, LeaseRow, of_unit, epoch, place))
    holders = ((lease, find_stream(cursor, lease.stream)) for lease in leases)
    before = [(lease, stream) for lease, stream in holders if stream is not None]
    after = [(lease, updated if stream.key == updated.key else stream) for lease, stream in before]
    returned = read_rows(cursor, ReturnedRow, of_unit, epoch, place)
    free = [(row.start, row.stop) for row in returned]
    # Between two neighbouring edges all samples of the unit are in the same state.
    edges = {edge for each in free for edge in each}
    for lease, stream in before + after:
        origin = lease.start - lease.stream_start
        edges |= {lease.start, lease.stop, origin + stream.position, origin + stream.in_part}
    borders = np.array(sorted(edges))
    samples, sizes = borders[:-1], np.diff(borders)
    was, now = _counts(before, samples), _counts(after, samples)
    # What no lease held before stays as it is: a damaged lease, which is left out, frees nothing.
    is_free = was[:2].any(0)
    for start, stop in free:
        is_free |= (start <= samples) & (samples < stop)
    is_free &= ~now[:2].any(0)
    ranges = borders[np.diff(is_free, prepend=False, append=False)].reshape(-1, 2)
    cursor.execute(f"DELETE FROM returned WHERE {of_unit}", (epoch, place))
    rows = [(epoch, place, *each) for each in ranges.tolist()]
    cursor.executemany("INSERT INTO returned VALUES (?, ?, ?, ?)", rows)
    done, leased, in_part, twice = ((now - was) @ sizes).tolist()
    cursor.execute(
        "UPDATE epochs SET done = done + ?, leased = leased + ?,"
        " trained_in_part = trained_in_part + ?, trained_twice = trained_twice + ? WHERE key = ?",
        (done, leased, in_part, twice, epoch),
    )
    return done + leased


def _counts(holders: Sequence[tuple[LeaseRow, StreamRow]], samples: np.ndarray) -> np.ndarray:
    """What samples of a unit add to their epoch's done, leased, trained_in_part and trained_twice.

    A sample is available if it adds nothing to the first two.

    Args:
        holders: All leases of the unit, and their streams.
        samples: Numbers of samples in the unit's own order, of shape (n,).

    Returns:
        Integers of shape (4, n).
    """
    done, held, in_part = np.zeros((3, len(samples)), int)
    for lease, stream in holders:
        is_in = (lease.start <= samples) & (samples < lease.stop)
        numbers = lease.stream_start + samples - lease.start  # of the stream
        is_done = numbers < stream.position
        done += is_in & is_done
        if stream.is_open:
            held += is_in & ~is_done
        else:
            in_part += is_in & ~is_done & (numbers < stream.in_part)
    twice = np.maximum(done + held - 1, 0)
    return np.stack([(done > 0) & (held == 0), held > 0, in_part, twice])
