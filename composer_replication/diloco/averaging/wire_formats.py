"""Wire formats: fp32 values quantized to fewer bytes, and dequantized again."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_sizes import SIZES, sections
from composer_replication.settings import WireFormatName

SMALLEST = 1e-30
"""A block whose largest value is below this becomes zeros: 1 / scale would overflow."""


class WireFormat(ABC):
    """Quantizes fp32 values for the network. All groups decode the same bytes to the same bits.

    Values are rounded to the nearest. All lengths are multiples of ``wire_sizes.PART`` elements.
    """

    name: WireFormatName
    _dtypes: Sequence[torch.dtype]
    """Of the header, the scales and the codes of a message."""

    def num_bytes(self, num_elements: int) -> int:
        """Return how many bytes ``num_elements`` take."""
        return sum(sections(self.name, num_elements))

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        into: Tensor,
    ) -> None:
        """Quantize finite 1-D fp32 values into 1-D uint8, aligned to 4 bytes."""

    @abstractmethod
    def decode(
        self,
        encoded: Tensor,
        into: Tensor,
    ) -> None:
        """Dequantize what ``encode`` has written, into fp32.

        Args:
            encoded: uint8: a message, or rows of messages of equal size, which take as many
                operations as one.
            into: fp32, 1-D, or as many rows.
        """

    def _split(
        self,
        encoded: Tensor,
        num_elements: int,
    ) -> list[Tensor]:
        """Views of the header, the scales and the codes of a message, or of rows of messages."""
        sizes = sections(self.name, num_elements)
        parts = encoded.split(sizes, dim=-1)
        return [*map(Tensor.view, parts, self._dtypes)]

    def _blocks(self, values: Tensor) -> Tensor:
        """A view of values, or of rows of them, in which a row has one scale."""
        return values.unflatten(-1, (-1, SIZES[self.name].block))


class BFloat16(WireFormat):
    """bfloat16: the upper half of fp32, rounded to the nearest."""

    name = "bfloat16"

    def encode(
        self,
        values: Tensor,
        into: Tensor,
    ) -> None:
        into.view(torch.bfloat16).copy_(values)

    def decode(
        self,
        encoded: Tensor,
        into: Tensor,
    ) -> None:
        into.copy_(encoded.view(torch.bfloat16))


class Int8(WireFormat):
    """Integers from -127 to 127, with an fp32 scale for every 256 of them."""

    name = "int8"
    _dtypes = (torch.uint8, torch.float32, torch.int8)

    def encode(
        self,
        values: Tensor,
        into: Tensor,
    ) -> None:
        _, scales, codes = self._split(into, values.numel())
        blocks = self._blocks(values)
        largest = blocks.abs().amax(1)
        most = on(values.device, 127.0)
        torch.div(largest, most, out=scales)
        scales.clamp_(min=SMALLEST)
        rounded = blocks.div(scales.unsqueeze(1))
        rounded.round_()
        codes.copy_(rounded.view(-1))

    def decode(
        self,
        encoded: Tensor,
        into: Tensor,
    ) -> None:
        _, scales, codes = self._split(encoded, into.shape[-1])
        into.copy_(codes)
        blocks = self._blocks(into)
        blocks.mul_(scales.unsqueeze(-1))


class Fp4(WireFormat):
    """Block floating point: integers from -7 to 7, with an 8-bit scale for every 32 of them.

    The scale has 5 bits of exponent, relative to the largest scale of the frame, and 3 bits of
    mantissa. The pseudo-gradient of Adam has about the same magnitude everywhere in a block, so
    evenly spaced values have half the rounding error of E2M1, and a third of that of E3M0, the
    format of arXiv 2501.18512 (docs/adrs/ADR-017). Two elements share a byte: an element of the
    frame's first half, in the lower bits, and one of its second half.
    """

    name = "fp4"
    _dtypes = (torch.int32, torch.uint8, torch.int8)
    _largest = 7.0
    _scale_shift = 20  # of fp32's 23 bits of mantissa, 3 are kept

    def encode(
        self,
        values: Tensor,
        into: Tensor,
    ) -> None:
        head, scales, codes = self._split(into, values.numel())
        blocks = self._blocks(values)
        largest = blocks.abs().amax(1)
        largest.clamp_(min=SMALLEST)
        # Each block's scale: its largest magnitude, rounded up.
        bits = largest.view(torch.int32)
        bits.add_(2**self._scale_shift - 1)
        bits.bitwise_right_shift_(self._scale_shift)
        top = bits.amax(0, keepdim=True)
        torch.sub(top, 255, out=head)
        torch.maximum(bits, head, out=bits)
        torch.sub(bits, head, out=scales)
        bits.bitwise_left_shift_(self._scale_shift)
        # On every device as ``largest / scale`` is on a CPU, which rounds twice.
        factors = bits.view(torch.float32)
        factors.reciprocal_()
        factors.mul_(self._largest)
        rounded = blocks.mul(factors.unsqueeze(1))
        rounded.round_()
        integers = rounded.to(torch.int8)
        low, high = integers.view(2, -1)
        high.bitwise_left_shift_(4)
        low.bitwise_and_(15)
        torch.bitwise_or(high, low, out=codes)

    def decode(
        self,
        encoded: Tensor,
        into: Tensor,
    ) -> None:
        head, scales, codes = self._split(encoded, into.shape[-1])
        bits = scales.int()
        bits.add_(head)
        bits.bitwise_left_shift_(self._scale_shift)
        factors = bits.view(torch.float32)
        largest = on(bits.device, self._largest)
        factors.div_(largest)
        # Both halves of each byte, with their signs.
        shifts = on(bits.device, 4, 0, dtype=torch.int8)
        rows = codes.unsqueeze(-2)
        halves = rows.bitwise_left_shift(shifts.unsqueeze(1))
        halves.bitwise_right_shift_(4)
        both = into.unflatten(-1, (2, -1))
        both.copy_(halves)
        blocks = self._blocks(into)
        blocks.mul_(factors.unsqueeze(-1))


@functools.cache
def on(
    device: torch.device,
    *numbers: float,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return numbers in a device's memory: 1-D, kept for the next time.

    By a Python number a CUDA device multiplies with the reciprocal, which rounds twice: the bits
    of a quotient would not be those of a CPU.
    """
    return torch.tensor(numbers, dtype=dtype, device=device)


def make_wire_format(name: str) -> WireFormat:
    """Return the wire format of that name. float32 has none: it is summed directly."""
    formats = {cls.name: cls for cls in (BFloat16, Int8, Fp4)}
    return formats[name]()
