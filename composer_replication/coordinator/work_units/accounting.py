"""Keeps the available ranges and the counts of an epoch consistent with its streams.

They follow from the leases, the positions and which streams are open. ``update_stream`` changes one
stream and recounts every unit that it touches. For one unit and one lease of it::

    lease.start              committed                lease.stop
        |---- in the model ------|---- leased ------------|      stream open
        |---- in the model ------|---- available ---------|      stream closed
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from composer_replication.coordinator.work_units.tables import (
    LeaseRow,
    ReturnedRow,
    StreamRow,
    is_valid_row,
    read_rows,
)


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
