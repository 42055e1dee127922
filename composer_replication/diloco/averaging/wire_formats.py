"""Wire formats: fp32 values quantized to fewer bytes, and dequantized again."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_sizes import SIZES, encoded_bytes
from composer_replication.settings import WireFormatName

SMALLEST = 1e-30
"""A block whose largest value is below this becomes zeros: 1 / scale would overflow."""


class WireFormat(ABC):
    """Quantizes fp32 values for the network. All groups decode the same bytes to the same bits.

    Values are rounded to the nearest. All lengths are multiples of ``wire_sizes.PART`` elements.
    """

    name: WireFormatName

    def num_bytes(self, num_elements: int) -> int:
        """Return how many bytes ``num_elements`` take."""
        return encoded_bytes(self.name, num_elements)

    @abstractmethod
    def encode(self, values: Tensor, into: Tensor) -> None:
        """Quantize finite 1-D fp32 values into 1-D uint8, aligned to 4 bytes."""

    @abstractmethod
    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Dequantize what ``encode`` has written, into 1-D fp32."""


class BFloat16(WireFormat):
    """bfloat16: the upper half of fp32, rounded to the nearest."""

    name = "bfloat16"

    def encode(self, values: Tensor, into: Tensor) -> None:
        into.view(torch.bfloat16).copy_(values)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        into.copy_(encoded.view(torch.bfloat16))


class Int8(WireFormat):
    """Integers from -127 to 127, with an fp32 scale for every 256 of them."""

    name = "int8"
    _block = SIZES["int8"].block

    def encode(self, values: Tensor, into: Tensor) -> None:
        scales, codes = self._split(into)
        blocks = values.view(-1, self._block)
        largest = blocks.abs().amax(1, keepdim=True)
        scale = divided(largest, 127.0).clamp_(min=SMALLEST)
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
    """Block floating point: integers from -7 to 7, with an 8-bit scale for every 32 of them.

    The scale has 5 bits of exponent, relative to the largest scale of the frame, and 3 bits of
    mantissa. The pseudo-gradient of Adam has about the same magnitude everywhere in a block, so
    evenly spaced values have half the rounding error of E2M1, and a third of that of E3M0, the
    format of arXiv 2501.18512 (docs/adrs/ADR-017). Two elements share a byte: an element of the
    frame's first half, in the lower bits, and one of its second half.
    """

    name = "fp4"
    _block, _header = SIZES["fp4"].block, SIZES["fp4"].header
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
        factors = divided(self._as_scale(scales, head), self._largest)
        low, high = into.view(2, -1)
        low.copy_((codes << 4) >> 4)  # with its sign
        high.copy_(codes >> 4)
        into.view(-1, self._block).mul_(factors)

    def _write_scales(self, largest: Tensor, head: Tensor, scales: Tensor) -> Tensor:
        """Write each block's scale, rounded up from its largest magnitude. Returns it decoded."""
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
        blocks = (encoded.numel() - self._header) // (self._block // 2 + 1)
        head, rest = encoded[: self._header].view(torch.int32), encoded[self._header :]
        return head, rest[:blocks], rest[blocks:].view(torch.int8)


def divided(values: Tensor, by: float) -> Tensor:
    """Return the quotients, in the same bits on every device.

    By a Python number a CUDA device multiplies with the reciprocal, which rounds twice.
    """
    return values / values.new_full((), by)


def make_wire_format(name: str) -> WireFormat:
    """Return the wire format of that name. float32 has none: it is summed directly."""
    return {cls.name: cls for cls in (BFloat16, Int8, Fp4)}[name]()
