"""The rows of the peer table: how they are sent, and what the groups conclude from them.

All groups have received the same rows, so they conclude the same.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from torch import Tensor

from composer_replication.diloco.outer_health import GroupMetrics
from composer_replication.diloco.sample_ledger import SyncedSamples

CHECKSUM_BYTES = 4


class PeerRow(NamedTuple):
    """What one replica group reports to the others beside a sync.

    A row is sent as bytes, each field in the type that ``_TYPES`` has for its annotation. A further
    number needs a field here, or in ``GroupMetrics``, and nothing else.

    Attributes:
        has_more: Whether it still trains, or has steps that are not in the global parameters yet.
        is_joining: Whether it joins with this sync and contributes nothing.
        was_healed: Whether it has taken over the global state since its last sync.
        outer_step: Its outer step.
        metrics: Its contribution, norm and pace in this sync.
        samples: How much of its sample stream is in the model once this sync has committed.
        batches: 60 bits of the digest of its first batches, as a number above 0, at its first
            sync; else 0.
        digests: 60 bits of the digest of each fragment's global parameters; zeros where none is
            due.
    """

    has_more: bool
    is_joining: bool
    was_healed: bool
    outer_step: int
    metrics: GroupMetrics
    samples: SyncedSamples
    batches: int
    digests: tuple[int, ...]

    def encode(self) -> bytes:
        """The row as bytes, with a checksum. They are never all zeros, as an empty row is."""
        kind = _dtype(PeerRow, len(self.digests))
        row = np.array(tuple(self), kind).tobytes()
        return row + _checksum(row)

    @classmethod
    def decode(cls, sent: bytes, num_digests: int) -> PeerRow:
        """Return the row that ``encode`` has turned into these bytes.

        Raises:
            ValueError: The bytes are damaged, or a number is negative or not finite.
        """
        row = sent[:-CHECKSUM_BYTES]
        if sent != row + _checksum(row):
            raise ValueError("its row in the peer table is damaged")
        [numbers] = np.frombuffer(row, _dtype(cls, num_digests))
        sent_row = cls(*numbers.item())
        decoded = sent_row._replace(
            metrics=GroupMetrics(*sent_row.metrics),
            samples=SyncedSamples(*sent_row.samples),
            digests=tuple(map(int, sent_row.digests)),
        )
        odd = [*_odd(decoded)]
        if odd:
            raise ValueError(f"its row in the peer table has {', '.join(odd)}")
        return decoded


_TYPES: dict[Any, Any] = {bool: "?", int: "<i8", float: "<f4"}


@functools.cache
def _dtype(kind: Any, num_digests: int = 0) -> np.dtype:
    """The fields of a NamedTuple with their types, in their order and without gaps."""
    types = _TYPES | {tuple[int, ...]: ("<i8", (num_digests,))}
    fields = []
    for name, hint in get_type_hints(kind).items():
        fields.append((name, types[hint] if hint in types else _dtype(hint)))
    return np.dtype(fields)


ROW = _dtype(PeerRow).itemsize
"""Bytes of a row without digests and checksum."""


def _odd(part: Any) -> Iterator[str]:
    """Yield the numbers that no group can have: those that are negative or not finite.

    Fields whose default is NaN may be NaN: the group does not know them.
    """
    for name, value in part._asdict().items():
        if hasattr(value, "_fields"):
            yield from _odd(value)
            continue
        numbers = np.atleast_1d(value)
        is_right = (numbers >= 0) & (numbers < math.inf)
        if math.isnan(part._field_defaults.get(name, 0.0)):
            is_right |= np.isnan(numbers)
        if not is_right.all():
            yield f"{name}={value}"


def _checksum(row: bytes) -> bytes:
    """A CRC-32 of a row's bytes, to find bits that flipped on the way."""
    return zlib.crc32(row).to_bytes(CHECKSUM_BYTES, "little")


def read_rows(table: Tensor, num_digests: int) -> tuple[dict[int, PeerRow], dict[int, str]]:
    """Decode a table.

    Args:
        table: The encoded rows, uint8 on the CPU, shape ``(groups, bytes)``.
        num_digests: How many digests a row has.

    Returns:
        The valid rows by rank in the quorum, and by rank what is wrong with the others.
    """
    rows: dict[int, PeerRow] = {}
    faults: dict[int, str] = {}
    for rank, row in enumerate(table):
        try:
            rows[rank] = PeerRow.decode(row.numpy().tobytes(), num_digests)
        except ValueError as error:
            # Of connections of another quorum too. A retry has others, and gathers.
            faults[rank] = str(error) if row.any() else "its row in the peer table is empty"
    return rows, faults


def find_differences(rows: Mapping[int, PeerRow]) -> Iterator[tuple[list[int], str]]:
    """Yield how the groups' outer steps and digests differ.

    Yields the ranks of the groups that hold something else than most groups, of all groups if there
    is no majority, and what differs.

    Args:
        rows: The valid rows by rank in the quorum. At least one.
    """
    steps = {rank: row.outer_step for rank, row in rows.items()}
    yield from _compare(rows, steps, "the outer step")
    num_fragments = len(next(iter(rows.values())).digests)
    for fragment in range(num_fragments):
        sent = {}
        for rank, row in rows.items():
            if row.digests[fragment]:  # a group for which no digest was due has sent none
                sent[rank] = row.digests[fragment]
        yield from _compare(rows, sent, f"the global parameters of {fragment=}")


def _compare(
    rows: Mapping[int, PeerRow],
    held: Mapping[int, int],
    what: str,
) -> Iterator[tuple[list[int], str]]:
    if len(set(held.values())) < 2:
        return
    # A group that has just been healed holds a copy, which is no evidence of what is right.
    trusted = [value for rank, value in held.items() if not rows[rank].was_healed]
    most, count = Counter(trusted or held.values()).most_common(1)[0]
    ranks = [*held]
    if 2 * count > len(trusted):  # there is a majority
        ranks = [rank for rank, value in held.items() if value != most]
    yield ranks, what


def equal_samples(
    rows: Mapping[int, PeerRow],
    own_rank: int,
    names: Sequence[str],
) -> tuple[str, ...]:
    """The groups whose first batches are equal to this group's, and its own; empty if none are.

    Args:
        rows: The valid rows by rank in the quorum.
        own_rank: This group's rank.
        names: The names of the groups in the order of their ranks.
    """
    own = rows[own_rank].batches if own_rank in rows else 0
    if not own:
        return ()
    same = [names[rank] for rank, row in rows.items() if row.batches == own]
    return tuple(same) if len(same) > 1 else ()
