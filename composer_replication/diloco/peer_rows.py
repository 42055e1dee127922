"""The rows of the peer table: how they are sent, and what the groups conclude from them.

All groups have received the same rows, so they conclude the same.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from composer_replication.diloco.outer_health import GroupMetrics
from composer_replication.diloco.sample_ledger import SyncedSamples

CHECKSUM_BYTES = 4


class PeerRow(NamedTuple):
    """What one replica group reports to the others beside a sync.

    A row is sent as bytes, see ``_layout``. A further metric is a field of ``GroupMetrics``, not
    negative, which ``FragmentSync.metrics`` fills.

    Attributes:
        has_more: Whether it still trains, or has steps that are not in the global parameters yet.
        is_joining: Whether it joins with this sync and contributes nothing.
        was_healed: Whether it has taken over the global state since it last reported a sync.
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
        *own, metrics, samples, batches, digests = self
        row = _layout(len(digests)).pack(*own, *metrics, *samples, batches, *digests)
        return row + _checksum(row)

    @classmethod
    def decode(cls, sent: bytes, num_digests: int) -> PeerRow:
        """Return the row that ``encode`` has turned into these bytes.

        Raises:
            ValueError: The bytes are damaged, or a metric is negative or not finite.
        """
        row = sent[:-CHECKSUM_BYTES]
        if sent != row + _checksum(row):
            raise ValueError("its row in the peer table is damaged")
        numbers = iter(_layout(num_digests).unpack(row))
        own = [*islice(numbers, 4)]
        metrics = GroupMetrics(*islice(numbers, len(GroupMetrics._fields)))
        samples = SyncedSamples(*islice(numbers, len(SyncedSamples._fields)))
        batches, *digests = numbers
        odd = [*_odd(metrics)]
        if odd:
            raise ValueError(f"its row in the peer table has {', '.join(odd)}")
        return cls._make([*own, metrics, samples, batches, tuple(digests)])


Rows = Mapping[int, PeerRow]
"""The valid rows of a table, by rank in the quorum."""


def _layout(num_digests: int) -> struct.Struct:
    """The types of a row's numbers in their order, without gaps. Integers have no sign."""
    metrics = "f" * len(GroupMetrics._fields)
    samples = "Q" * len(SyncedSamples._fields)
    return struct.Struct(f"<???Q{metrics}{samples}Q{num_digests}Q")


ROW = _layout(0).size
"""Bytes of a row without digests and checksum."""


def _odd(metrics: GroupMetrics) -> Iterator[str]:
    """Yield the metrics that no group can have: those that are negative or not finite.

    Those whose default is NaN may be NaN: the group does not know them.
    """
    for name, value in metrics._asdict().items():
        default = GroupMetrics._field_defaults[name]
        is_unknown = math.isnan(value) and math.isnan(default)
        if not is_unknown and not 0 <= value < math.inf:
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


def find_differences(rows: Rows) -> Iterator[tuple[list[int], str]]:
    """Yield how the groups' outer steps and digests differ.

    Yields the ranks of the groups that hold something else than most groups, of all groups if there
    is no majority, and what differs.

    Args:
        rows: At least one.
    """
    held = {"the outer step": {rank: row.outer_step for rank, row in rows.items()}}
    num_fragments = len(next(iter(rows.values())).digests)
    for fragment in range(num_fragments):
        digests = held.setdefault(f"the global parameters of {fragment=}", {})
        for rank, row in rows.items():
            if row.digests[fragment]:  # a group for which no digest was due has sent none
                digests[rank] = row.digests[fragment]
    for what, values in held.items():
        if len(set(values.values())) < 2:
            continue
        # A group that has just been healed holds a copy, which is no evidence of what is right.
        trusted = [value for rank, value in values.items() if not rows[rank].was_healed]
        most, count = Counter(trusted or values.values()).most_common(1)[0]
        ranks = [*values]
        if 2 * count > len(trusted):  # there is a majority
            ranks = [rank for rank, value in values.items() if value != most]
        yield ranks, what
