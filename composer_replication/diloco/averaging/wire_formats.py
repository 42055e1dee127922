"""Wire formats: fp32 numbers in fewer bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_sizes import (
    BLOCK,
    FP4_HEADER,
    WIRE_FORMATS,
    encoded_bytes,
)

SMALLEST = 1e-30
"""Below this a block counts as zeros: the reciprocal of its scale would overflow."""


class WireFormat(ABC):
    """How numbers travel. Rounds to the nearest; the same bytes decode to the same bits everywhere.

    All lengths are multiples of ``wire_sizes.PART`` elements.
    """

    name: str

    def num_bytes(self, num_elements: int) -> int:
        """How many bytes so many elements take."""
        return encoded_bytes(self.name, num_elements)

    @abstractmethod
    def encode(self, values: Tensor, into: Tensor) -> None:
        """Write finite 1-D fp32 values into 1-D uint8, which starts at a multiple of 4 bytes."""

    @abstractmethod
    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Write what ``encode`` made of them into 1-D fp32."""


class BFloat16(WireFormat):
    """The upper half of fp32."""

    name = "bfloat16"

    def encode(self, values: Tensor, into: Tensor) -> None:
        into.view(torch.bfloat16).copy_(values)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        into.copy_(encoded.view(torch.bfloat16))


class Int8(WireFormat):
    """Integers from -127 to 127; an fp32 scale for every 256 of them."""

    name = "int8"
    _block = BLOCK["int8"]

    def encode(self, values: Tensor, into: Tensor) -> None:
        scales, codes = self._split(into)
        blocks = values.view(-1, self._block)
        scale = blocks.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=SMALLEST)
        scales.copy_(scale.view(-1))
        codes.copy_(blocks.div(scale).round_().view(-1))

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        scales, codes = self._split(encoded)
        into.copy_(codes)
        into.view(-1, self._block).mul_(scales.view(-1, 1))

    def _split(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        blocks = encoded.numel() // (self._block + 4)
        return encoded[: 4 * blocks].view(torch.float32), encoded[4 * blocks :].view(torch.int8)


class Fp4(WireFormat):
    """Block floating point: integers from -7 to 7; an 8-bit scale for every 32 of them.

    The scale has 5 bits of exponent, counted down from the largest of the frame, and 3 of
    mantissa. The pseudo-gradient of an Adam has about the same size everywhere in a block: even
    steps round it half as much as E2M1, and a third as much as the E3M0 of arXiv 2501.18512
    (docs/adrs/ADR-017). Two elements share a byte: one of the frame's first half, in the lower
    bits, and one of the second.
    """

    name = "fp4"
    _block = BLOCK["fp4"]
    _largest = 7.0
    _scale_shift = 20  # of fp32's 23 bits of mantissa, 3 are kept

    def encode(self, values: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(into)
        blocks = values.view(-1, self._block)
        factors = self._largest / self._write_scales(blocks.abs().amax(1), head, scales)
        low, high = blocks.mul(factors).round_().to(torch.int8).view(2, -1)
        codes.copy_(high.bitwise_left_shift_(4).bitwise_or_(low.bitwise_and_(15)))

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(encoded)
        factors = self._as_scale(scales, head) / self._largest
        low, high = into.view(2, -1)
        low.copy_((codes << 4) >> 4)  # with its sign
        high.copy_(codes >> 4)
        into.view(-1, self._block).mul_(factors)

    def _write_scales(self, largest: Tensor, head: Tensor, scales: Tensor) -> Tensor:
        """Of each block, from its largest size; and what they decode to."""
        largest = largest.clamp(min=SMALLEST)
        rounded = (largest.view(torch.int32) + 2**self._scale_shift - 1) >> self._scale_shift  # up
        base = rounded.max() - 255
        head.copy_(base)
        scales.copy_((rounded - base).clamp_(min=0))
        return self._as_scale(scales, base)

    def _as_scale(self, scales: Tensor, base: Tensor) -> Tensor:
        bits = scales.int().add_(base).bitwise_left_shift_(self._scale_shift)
        return bits.view(torch.float32).view(-1, 1)

    def _split(self, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = (encoded.numel() - FP4_HEADER) // (self._block // 2 + 1)
        head, rest = encoded[:FP4_HEADER].view(torch.int32), encoded[FP4_HEADER:]
        return head, rest[:blocks], rest[blocks:].view(torch.int8)


def make_wire_format(name: str) -> WireFormat:
    """The format of that name; float32 has none, being summed as it is.

    Raises:
        ValueError: There is no such format.
    """
    formats = {cls.name: cls for cls in (BFloat16, Int8, Fp4)}
    if name not in formats:
        raise ValueError(f"wire_format={name!r}: use one of {', '.join(WIRE_FORMATS)}")
    return formats[name]()
