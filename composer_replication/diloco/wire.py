"""Wire formats: fp32 numbers in fewer bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from composer_replication.diloco.averaging import CHUNK
from composer_replication.diloco.wire_sizes import BLOCK, FP4_HEADER, WIRE_FORMATS, encoded_bytes

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
        for start, stop in _chunks(values):
            blocks = values[start:stop].view(-1, self._block)
            scale = blocks.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=SMALLEST)
            scales[start // self._block : stop // self._block] = scale.view(-1)
            codes[start:stop] = blocks.div(scale).round_().view(-1)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        scales, codes = self._split(encoded)
        for start, stop in _chunks(into):
            scale = scales[start // self._block : stop // self._block].view(-1, 1)
            into[start:stop].copy_(codes[start:stop])
            into[start:stop].view(-1, self._block).mul_(scale)

    def _split(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        blocks = encoded.numel() // (self._block + 4)
        return encoded[: 4 * blocks].view(torch.float32), encoded[4 * blocks :].view(torch.int8)


class Fp4(WireFormat):
    """E2M1, which is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign; an 8-bit scale for every 32 of them.

    A scale has 5 bits of exponent, counted down from the largest of the message, and 3 of mantissa
    (docs/adrs/ADR-017 compares it with the E3M0 of arXiv 2501.18512). Two elements share a byte:
    one of the message's first half, in the lower bits, and one of the second. It is made and read
    with integer operations on fp32's own bits, so that all devices come to the same.
    """

    name = "fp4"
    _block = BLOCK["fp4"]
    _largest = 6.0
    _scale_shift, _code_shift = 20, 22  # of fp32's 23 bits of mantissa, 3 and 1 are kept
    _code_base = 252  # the bits that 0.5 has there, which stands for 0

    def encode(self, values: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(into)
        largest = torch.cat([self._largest_of_blocks(values[a:b]) for a, b in _chunks(values)])
        rounded = (largest.view(torch.int32) + 2**self._scale_shift - 1) >> self._scale_shift  # up
        base = rounded.max() - 255
        head.copy_(base)
        scales.copy_((rounded - base).clamp_(min=0))
        factors = self._largest / self._as_scale(scales, base)
        half = values.numel() // 2
        for start, stop in _chunks(values[:half]):
            low = self._codes(values[start:stop], self._of(factors, start, stop))
            high = self._codes(
                values[half + start : half + stop], self._of(factors, half + start, half + stop)
            )
            codes[start:stop] = high.bitwise_left_shift_(4).bitwise_or_(low)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(encoded)
        factors = self._as_scale(scales, head) / self._largest
        half = into.numel() // 2
        for start, stop in _chunks(into[:half]):
            both = codes[start:stop].int()
            for first, nibbles in ((start, both & 15), (half + start, both >> 4)):
                last = first + stop - start
                self._values(nibbles, self._of(factors, first, last), into[first:last])

    def _largest_of_blocks(self, values: Tensor) -> Tensor:
        return values.view(-1, self._block).abs().amax(1).clamp_(min=SMALLEST)

    def _codes(self, values: Tensor, factor: Tensor) -> Tensor:
        """The 4 bits of each element, in int32."""
        size = values.view(-1, self._block).abs().mul_(factor).view(-1)
        # Below 1 the steps of E2M1 are 0.5, and those of fp32's upper bits between 0.5 and 1 0.25.
        bits = torch.maximum(size, (size + 1.0).mul_(0.5)).view(torch.int32)
        bits += 2 ** (self._code_shift - 1)  # to the nearest
        code = bits.bitwise_right_shift_(self._code_shift).sub_(self._code_base).clamp_(max=7)
        sign = values.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
        return code.bitwise_or_(sign)

    def _values(self, nibbles: Tensor, factor: Tensor, into: Tensor) -> None:
        bits = (nibbles & 7).add_(self._code_base).bitwise_left_shift_(self._code_shift)
        size = bits.view(torch.float32)
        torch.minimum(size, size * 2.0 - 1.0, out=into)
        into.view(torch.int32).bitwise_or_((nibbles & 8).bitwise_left_shift_(28))
        into.view(-1, self._block).mul_(factor)

    def _as_scale(self, scales: Tensor, base: Tensor) -> Tensor:
        bits = scales.int().add_(base).bitwise_left_shift_(self._scale_shift)
        return bits.view(torch.float32).view(-1, 1)

    def _of(self, factors: Tensor, start: int, stop: int) -> Tensor:
        return factors[start // self._block : stop // self._block]

    def _split(self, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = (encoded.numel() - FP4_HEADER) // (self._block // 2 + 1)
        head = encoded[:FP4_HEADER].view(torch.int32)
        return head, encoded[FP4_HEADER : FP4_HEADER + blocks], encoded[FP4_HEADER + blocks :]


def make_wire_format(name: str) -> WireFormat:
    """The format of that name; float32 has none, being summed as it is.

    Raises:
        ValueError: There is no such format.
    """
    formats = {cls.name: cls for cls in (BFloat16, Int8, Fp4)}
    if name not in formats:
        raise ValueError(f"wire_format={name!r}: use one of {', '.join(WIRE_FORMATS)}")
    return formats[name]()


def _chunks(values: Tensor) -> Iterator[tuple[int, int]]:
    """Where to cut, so that on a CPU the steps of one chunk find it in cache."""
    size = CHUNK if values.device.type == "cpu" else max(1, values.numel())
    for start in range(0, values.numel(), size):
        yield start, min(start + size, values.numel())
