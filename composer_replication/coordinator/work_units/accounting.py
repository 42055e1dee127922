"""What streams claim of each unit: how available ranges and counts are kept in step with that.

Everything follows from the leases, the positions and which streams are open; ``move`` changes one
of these and settles the units it touches, one at a time.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from composer_replication.coordinator.run_settings import RefusedError
from composer_replication.coordinator.work_units.tables import (
    LeaseRow,
    ReturnedRow,
    StreamRow,
    check_count,
    understood,
)


def move(
    cursor: sqlite3.Cursor, stream: StreamRow, position: int, in_part: int, is_open: int
) -> None:
    """Change how much of a stream is in the model, or whether the stream is open; not both."""
    low, high = sorted((stream.position, position))
    if is_open != stream.is_open:
        high = stream.samples
    leases = _overlapping(cursor, stream, low, high)
    moved = stream._replace(position=position, in_part=in_part, is_open=int(is_open))
    if leases and position != stream.position:
        moved = moved._replace(at_lease=leases[-1 if position > stream.position else 0].number)
    for epoch, place in dict.fromkeys((lease.epoch, lease.place) for lease in leases):
        _settle(cursor, epoch, place, moved)
    _settle_in_part(cursor, stream, moved)
    cursor.execute(
        "UPDATE streams SET position = ?, in_part = ?, is_open = ?, at_lease = ? WHERE key = ?",
        (moved.position, moved.in_part, moved.is_open, moved.at_lease, moved.key),
    )


def move_to(cursor: sqlite3.Cursor, stream: StreamRow, position: int, in_part: int) -> None:
    """Change how much of a stream is in the model, if that is something else than before."""
    if (position, in_part) != (stream.position, stream.in_part):
        move(cursor, stream, position, in_part, stream.is_open)


def check_entry(stream: StreamRow, position: int, in_part: int) -> None:
    """Compare what a ledger says of a stream with what was leased to it.

    Raises:
        RefusedError: It cannot be.
    """
    check_count(f"The position of stream {stream.key}", position)
    if position > in_part:
        raise RefusedError(
            f"Stream {stream.key} has {position} samples in the model and {in_part} in some part "
            "of it: the second has to be at least the first."
        )
    if in_part > stream.samples:
        raise RefusedError(
            f"Position {in_part} of stream {stream.key} is beyond the {stream.samples} samples "
            "that it has leased: commit what it has trained on."
        )


def count_available(cursor: sqlite3.Cursor, stream: StreamRow) -> int:
    """Samples of a closed stream that are not committed and that nobody has taken."""
    free = 0
    for lease in _overlapping(cursor, stream, stream.position, stream.samples):
        # What the stream itself has committed of the lease is not available to anybody.
        for start, stop in _available(cursor, lease.epoch, lease.place):
            free += max(0, min(stop, lease.stop) - max(start, lease.start))
    return free


def _overlapping(cursor: sqlite3.Cursor, stream: StreamRow, low: int, high: int) -> list[LeaseRow]:
    """The leases that make up ``[low, high)`` of a stream; its position is one of the two."""
    forward = low == stream.position
    walk = ">= ? ORDER BY number" if forward else "<= ? ORDER BY number DESC"
    cursor.execute(
        f"SELECT * FROM leases WHERE stream = ? AND number {walk}", (stream.key, stream.at_lease)
    )
    found = []
    for lease in filter(understood, map(LeaseRow._make, cursor)):
        stream_stop = lease.stream_start + lease.stop - lease.start
        if (lease.stream_start >= high) if forward else (stream_stop <= low):
            break
        if max(lease.stream_start, low) < min(stream_stop, high):
            found.append(lease)
    return sorted(found)


def _settle_in_part(cursor: sqlite3.Cursor, stream: StreamRow, moved: StreamRow) -> None:
    change = _in_part_by_epoch(cursor, moved)
    change.subtract(_in_part_by_epoch(cursor, stream))
    cursor.executemany(
        "UPDATE epochs SET trained_in_part = trained_in_part + ? WHERE key = ?",
        [(count, epoch) for epoch, count in change.items() if count],
    )


def _in_part_by_epoch(cursor: sqlite3.Cursor, stream: StreamRow) -> Counter[int]:
    """Samples that a closed stream has left in some fragments: they will be trained again."""
    found: Counter[int] = Counter()
    if not stream.is_open and stream.position < stream.in_part:
        for lease in _overlapping(cursor, stream, stream.position, stream.in_part):
            stream_stop = lease.stream_start + lease.stop - lease.start
            low, high = max(lease.stream_start, stream.position), min(stream_stop, stream.in_part)
            found[lease.epoch] += high - low
    return found


def _available(cursor: sqlite3.Cursor, epoch: int, place: int) -> list[tuple[int, int]]:
    cursor.execute(
        "SELECT * FROM returned WHERE epoch = ? AND place = ? ORDER BY start", (epoch, place)
    )
    return [(row.start, row.stop) for row in map(ReturnedRow._make, cursor) if understood(row)]


def _claim(lease: LeaseRow, position: int, is_open: int) -> tuple[int, int, int]:
    """Three edges: a stream has committed up to the second, and holds up to the third."""
    size = lease.stop - lease.start
    committed = lease.start + min(max(position - lease.stream_start, 0), size)
    return lease.start, committed, lease.stop if is_open else committed


def _counts(claims: Sequence[tuple[int, int, int]], sample: int) -> tuple[int, int, int]:
    """What a sample adds to its epoch's done, leased and trained_twice; zeros: it is available."""
    held = sum(committed <= sample < stop for _, committed, stop in claims)
    done = sum(start <= sample < committed for start, committed, _ in claims)
    return int(done > 0 and held == 0), int(held > 0), max(0, done + held - 1)


def _settle(cursor: sqlite3.Cursor, epoch: int, place: int, moved: StreamRow) -> None:
    """Bring one unit's available ranges and counts in step with what a stream is about to be."""
    before, after = _claims(cursor, epoch, place, moved)
    old_ranges = _available(cursor, epoch, place)
    ranges: list[tuple[int, int]] = []
    change = [0, 0, 0]
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
        cursor.execute("DELETE FROM returned WHERE epoch = ? AND place = ?", (epoch, place))
        rows = [(epoch, place, *free) for free in ranges]
        cursor.executemany("INSERT INTO returned VALUES (?, ?, ?, ?)", rows)
    cursor.execute(
        "UPDATE epochs SET done = done + ?, leased = leased + ?, trained_twice = trained_twice + ?"
        " WHERE key = ?",
        (*change, epoch),
    )


def _claims(
    cursor: sqlite3.Cursor, epoch: int, place: int, moved: StreamRow
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """All claims on a unit, as they are and as they are about to be."""
    cursor.execute(
        "SELECT leases.*, position, is_open FROM leases"
        " JOIN streams ON streams.key = leases.stream WHERE epoch = ? AND place = ?",
        (epoch, place),
    )
    before, after = [], []
    for *fields, position, is_open in cursor.fetchall():
        if understood(lease := LeaseRow(*fields)) and type(position) is int:
            before.append(_claim(lease, position, is_open))
            if lease.stream == moved.key:
                position, is_open = moved.position, moved.is_open
            after.append(_claim(lease, position, is_open))
    return before, after
