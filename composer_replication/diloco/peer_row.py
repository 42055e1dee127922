"""What one replica group reports to the others beside a sync: a row of the peer table."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composer_replication.diloco.outer_health import Vitals
from composer_replication.diloco.sample_ledger import SyncedSamples

BITS = 22
"""Bits of a number that a sum in fp32 keeps exactly, with room for the 1 that marks it as set."""


ROW = 15 + len(Vitals._fields)
"""Numbers of a row beside the digests."""


@dataclass(frozen=True)
class PeerRow:
    """What one replica group reports to the others beside a sync.

    Attributes:
        has_more: Whether it still trains, or has steps that no sync has brought in.
        is_joining: Whether it joins with this sync and contributes nothing.
        was_healed: Whether it has taken over the global state since its last sync.
        outer_step: Its outer step, modulo 2**22.
        is_replacing: Whether its local parameters are to be the global ones, see
            ``DiLoCo.make_local_global``.
        vitals: Its contribution, norm and pace: any numbers of fp32, to which the others
            add 0.
        samples: How much of its sample stream is in the model once this sync has committed.
        batches: 44 bits of the digest of its first batches, as two numbers above 0, at its first
            sync; else zeros.
        digests: The same of each fragment's global parameters; zeros where none is due.
    """

    has_more: bool
    is_joining: bool
    was_healed: bool
    outer_step: int
    is_replacing: bool
    vitals: Vitals
    samples: SyncedSamples
    batches: tuple[int, ...]
    digests: tuple[tuple[int, ...], ...]

    def encode(self) -> list[float]:
        """The row as numbers of fp32. The first is a 1: this group is in the sum."""
        flags = self.has_more, self.is_joining, self.was_healed
        numbers = [
            *(1, *flags, self.outer_step, self.is_replacing),
            *self.vitals,
            *(half for number in self.samples for half in divmod(number, 2**BITS)),
            *self.batches,
            *(half for digest in self.digests for half in digest),
        ]
        rounded = torch.tensor(numbers, dtype=torch.float32).tolist()
        return [*rounded, _checksum(rounded)]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> PeerRow:
        """The row of which ``encode`` made these numbers.

        Raises:
            ValueError: It made other ones, or a number is not finite, negative or no integer.
        """
        *numbers, checksum = numbers
        size = 6 + len(Vitals._fields)
        vitals, counts = Vitals(*numbers[6:size]), [*numbers[:6], *numbers[size:]]
        if checksum != _checksum(numbers):
            raise ValueError("its row in the peer table is damaged")
        odd = [n for n in counts if not (0.0 <= n <= 2**BITS and n == round(n))]
        if odd or not vitals.is_sound():
            raise ValueError(f"its row in the peer table has {odd or vitals}")
        _, more, joining, healed, step, replacing = map(int, numbers[:6])
        rest = [int(number) for number in numbers[size:]]
        samples, batches, digests = rest[:6], rest[6:8], rest[8:]
        whole = ((high << BITS) + low for high, low in _pairs(samples))
        return cls(
            bool(more), bool(joining), bool(healed), step, bool(replacing),
            vitals, SyncedSamples(*whole), tuple(batches), tuple(_pairs(digests)),
        )  # fmt: skip


def _checksum(numbers: Sequence[float]) -> float:
    """Tells whether the bits of a row are those that were sent."""
    return float(zlib.crc32(repr([*numbers]).encode()) % 2**BITS)


def _pairs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def as_numbers(digest: str) -> tuple[int, int]:
    """44 bits of a digest in hex, as two numbers above 0."""
    bits = int(digest[:11], 16)
    return (bits >> BITS) + 1, bits % 2**BITS + 1
