"""Wire formats: fp32 values quantized to fewer bytes, and dequantized again."""

from __future__ import annotations

import functools
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
        """Dequantize what ``encode`` has written, into fp32.

        Args:
            encoded: uint8: a message, or rows of messages of equal size, which take as many
                operations as one.
            into: fp32, 1-D, or as many rows.
        """


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
        torch.div(blocks.abs().amax(1), on(values.device, 127.0), out=scales)
        scales.clamp_(min=SMALLEST)
        codes.copy_(blocks.div(scales.unsqueeze(1)).round_().view(-1))

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        scales, codes = self._split(encoded)
        into.copy_(codes)
        into.unflatten(-1, (-1, self._block)).mul_(scales.unsqueeze(-1))

    def _split(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        end = 4 * (encoded.shape[-1] // (self._block + 4))
        return encoded[..., :end].view(torch.float32), encoded[..., end:].view(torch.int8)


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
        bits = blocks.abs().amax(1).clamp_(min=SMALLEST).view(torch.int32)
        # Each block's scale: its largest magnitude, rounded up.
        rounded = bits.add_(2**self._scale_shift - 1).bitwise_right_shift_(self._scale_shift)
        torch.sub(rounded.amax(0, keepdim=True), 255, out=head)
        rounded = torch.maximum(rounded, head, out=rounded)
        torch.sub(rounded, head, out=scales)
        scale = rounded.bitwise_left_shift_(self._scale_shift).view(torch.float32)
        # On every device as ``largest / scale`` is on a CPU, which rounds twice.
        factors = scale.reciprocal_().mul_(self._largest).unsqueeze(1)
        low, high = blocks.mul(factors).round_().to(torch.int8).view(2, -1)
        torch.bitwise_or(high.bitwise_left_shift_(4), low.bitwise_and_(15), out=codes)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(encoded)
        bits = scales.int().add_(head).bitwise_left_shift_(self._scale_shift)
        factors = bits.view(torch.float32).div_(on(bits.device, self._largest))
        # Both halves of each byte, with their signs.
        shifts = on(bits.device, 4, 0, dtype=torch.int8).unsqueeze(1)
        halves = codes.unsqueeze(-2).bitwise_left_shift(shifts).bitwise_right_shift_(4)
        into.unflatten(-1, (2, -1)).copy_(halves)
        into.unflatten(-1, (-1, self._block)).mul_(factors.unsqueeze(-1))

    def _split(self, encoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = (encoded.shape[-1] - self._header) // (self._block // 2 + 1)
        head, rest = encoded[..., : self._header].view(torch.int32), encoded[..., self._header :]
        return head, rest[..., :blocks], rest[..., blocks:].view(torch.int8)


@functools.cache
def on(device: torch.device, *numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers in a device's memory: 1-D, kept for the next time.

    By a Python number a CUDA device multiplies with the reciprocal, which rounds twice: the bits
    of a quotient would not be those of a CPU.
    """
    return torch.tensor(numbers, dtype=dtype, device=device)


def make_wire_format(name: str) -> WireFormat:
    """Return the wire format of that name. float32 has none: it is summed directly."""
    return {cls.name: cls for cls in (BFloat16, Int8, Fp4)}[name]()
