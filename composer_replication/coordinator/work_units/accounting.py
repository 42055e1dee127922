"""Keeps the available ranges and the counts of an epoch consistent with its streams.

They follow from the leases, the positions and which streams are open. ``update_stream`` changes one
stream and recounts every unit that it touches. For one unit and one lease of it::

    lease.start              committed                lease.stop
        |---- in the model ------|---- leased ------------|      stream open
        |---- in the model ------|---- available ---------|      stream closed
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

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
    """

    start: int
    committed: int
    stop: int


def update_stream(
    cursor: sqlite3.Cursor, stream: StreamRow, position: int, in_part: int, is_open: int
) -> None:
    """Change how much of a stream is in the model, or whether the stream is open; not both.

    Args:
        cursor: Of a transaction.
        stream: The stream as the database has it.
        position: Samples that are in every fragment of the model.
        in_part: Samples that are in at least one fragment.
        is_open: 1 for an open stream, 0 for a closed one.
    """
    low, high = sorted((stream.position, position))
    if is_open != stream.is_open:
        high = stream.samples
    leases = _overlapping(cursor, stream, low, high)
    updated = stream._replace(position=position, in_part=in_part, is_open=int(is_open))
    if leases and position != stream.position:
        updated = updated._replace(at_lease=leases[-1 if position > stream.position else 0].number)
    for epoch, epoch_rank in dict.fromkeys((lease.epoch, lease.epoch_rank) for lease in leases):
        _recount_unit(cursor, epoch, epoch_rank, updated)
    _recount_in_part(cursor, stream, updated)
    cursor.execute(
        "UPDATE streams SET position = ?, in_part = ?, is_open = ?, at_lease = ? WHERE key = ?",
        (updated.position, updated.in_part, updated.is_open, updated.at_lease, updated.key),
    )


def update_position(cursor: sqlite3.Cursor, stream: StreamRow, position: int, in_part: int) -> None:
    """Change how much of a stream is in the model, if it differs from what the database has."""
    if (position, in_part) != (stream.position, stream.in_part):
        update_stream(cursor, stream, position, in_part, stream.is_open)


def count_available(cursor: sqlite3.Cursor, stream: StreamRow) -> int:
    """Count the samples of a closed stream that are neither in the model nor leased by others."""
    count = 0
    for lease in _overlapping(cursor, stream, stream.position, stream.samples):
        # The ranges are those of the whole unit: only the part of this lease counts.
        for start, stop in _available(cursor, lease.epoch, lease.epoch_rank):
            count += max(0, min(stop, lease.stop) - max(start, lease.start))
    return count


def _overlapping(cursor: sqlite3.Cursor, stream: StreamRow, low: int, high: int) -> list[LeaseRow]:
    """The leases of ``[low, high)`` in a stream. One of the two has to be its position."""
    forward = low == stream.position
    walk = ">= ? ORDER BY number" if forward else "<= ? ORDER BY number DESC"
    which = f"stream = ? AND number {walk}"
    leases = []
    for lease in read_rows(cursor, LeaseRow, which, stream.key, stream.at_lease):
        stream_stop = lease.stream_start + lease.stop - lease.start
        if (lease.stream_start >= high) if forward else (stream_stop <= low):
            break
        if max(lease.stream_start, low) < min(stream_stop, high):
            leases.append(lease)
    return sorted(leases)


def _recount_in_part(cursor: sqlite3.Cursor, stream: StreamRow, updated: StreamRow) -> None:
    """Update the epochs' ``trained_in_part`` for a change of a stream."""
    change = _in_part_by_epoch(cursor, updated)
    change.subtract(_in_part_by_epoch(cursor, stream))
    cursor.executemany(
        "UPDATE epochs SET trained_in_part = trained_in_part + ? WHERE key = ?",
        [(count, epoch) for epoch, count in change.items() if count],
    )


def _in_part_by_epoch(cursor: sqlite3.Cursor, stream: StreamRow) -> Counter[int]:
    """Samples that a closed stream left in some fragments only. They will be trained on again."""
    counts: Counter[int] = Counter()
    if not stream.is_open and stream.position < stream.in_part:
        for lease in _overlapping(cursor, stream, stream.position, stream.in_part):
            stream_stop = lease.stream_start + lease.stop - lease.start
            low, high = max(lease.stream_start, stream.position), min(stream_stop, stream.in_part)
            counts[lease.epoch] += high - low
    return counts


def _available(cursor: sqlite3.Cursor, epoch: int, epoch_rank: int) -> list[tuple[int, int]]:
    """The available ranges ``[start, stop)`` of a unit that was leased before."""
    of_unit = "epoch = ? AND place = ? ORDER BY start"
    rows = read_rows(cursor, ReturnedRow, of_unit, epoch, epoch_rank)
    return [(row.start, row.stop) for row in rows]


def _interval(lease: LeaseRow, position: int, is_open: int) -> Interval:
    """What a stream has of a lease's unit, at a position of the stream."""
    size = lease.stop - lease.start
    committed = lease.start + min(max(position - lease.stream_start, 0), size)
    return Interval(lease.start, committed, lease.stop if is_open else committed)


def _counts(intervals: Sequence[Interval], sample: int) -> tuple[int, int, int]:
    """What a sample adds to its epoch's done, leased and trained_twice; all 0 if available."""
    held = sum(interval.committed <= sample < interval.stop for interval in intervals)
    done = sum(interval.start <= sample < interval.committed for interval in intervals)
    return int(done > 0 and held == 0), int(held > 0), max(0, done + held - 1)


def _recount_unit(cursor: sqlite3.Cursor, epoch: int, epoch_rank: int, updated: StreamRow) -> None:
    """Update the available ranges and the counts of a unit for a change of one stream."""
    before, after = _intervals_of_unit(cursor, epoch, epoch_rank, updated)
    old_ranges = _available(cursor, epoch, epoch_rank)
    ranges: list[tuple[int, int]] = []
    change = [0, 0, 0]
    # Between two neighbouring edges all samples of the unit are in the same state.
    for start, stop in pairwise(sorted({e for c in (*before, *after, *old_ranges) for e in c})):
        was, now = _counts(before, start), _counts(after, start)
        change = [c + (stop - start) * (n - w) for c, n, w in zip(change, now, was, strict=True)]
        is_free = any(a <= start < b for a, b in old_ranges)
        # Where nothing changes the old ranges stay as they are: a damaged lease frees nothing.
        if any(was) != any(now):
            is_free = not any(now)
        if is_free:
            merged = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((merged, stop))
    if ranges != old_ranges:
        cursor.execute("DELETE FROM returned WHERE epoch = ? AND place = ?", (epoch, epoch_rank))
        rows = [(epoch, epoch_rank, *free) for free in ranges]
        cursor.executemany("INSERT INTO returned VALUES (?, ?, ?, ?)", rows)
    cursor.execute(
        "UPDATE epochs SET done = done + ?, leased = leased + ?, trained_twice = trained_twice + ?"
        " WHERE key = ?",
        (*change, epoch),
    )


def _intervals_of_unit(
    cursor: sqlite3.Cursor, epoch: int, epoch_rank: int, updated: StreamRow
) -> tuple[list[Interval], list[Interval]]:
    """The intervals of all leases of a unit, before and after a change of one stream."""
    cursor.execute(
        "SELECT leases.*, position, is_open FROM leases"
        " JOIN streams ON streams.key = leases.stream WHERE epoch = ? AND place = ?",
        (epoch, epoch_rank),
    )
    before, after = [], []
    for *fields, position, is_open in cursor.fetchall():
        if is_valid_row(lease := LeaseRow(*fields)) and type(position) is int:
            before.append(_interval(lease, position, is_open))
            if lease.stream == updated.key:
                position, is_open = updated.position, updated.is_open
            after.append(_interval(lease, position, is_open))
    return before, after
