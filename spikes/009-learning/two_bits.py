"""A wire format of two bits, which the study tries and the package does not have."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from composer_replication import settings
from composer_replication.diloco.averaging import quantized_mean, wire_formats, wire_sizes

NAME: Any = "2bit"
BLOCK = 512
LEVELS = 4
RANGE = 6.0
"""Of the bins together, in standard deviations of a block."""


class TwoBits(wire_formats.WireFormat):
    """Four levels for each 512 values: the mean of those that fall into each of four bins.

    The bins are of equal width, from -3 to 3 standard deviations of the block around 0; the outer
    ones take what lies beyond. These are the statistical levels of arXiv 2505.23725. The levels are
    bfloat16, so that an element takes 2.125 bits. Four elements share a byte: one of each quarter.
    """

    name = NAME

    def encode(self, values: Tensor, into: Tensor) -> None:
        levels, codes = self._parts(into)
        blocks = values.view(-1, BLOCK)
        width = blocks.square().mean(1, keepdim=True).sqrt_().mul_(RANGE / LEVELS)
        bins = (blocks / width.clamp_(min=wire_formats.SMALLEST)).floor_().add_(LEVELS / 2)
        bins = bins.clamp_(0, LEVELS - 1).to(torch.int64)
        sums = blocks.new_zeros(len(blocks), LEVELS).scatter_add_(1, bins, blocks)
        counts = torch.zeros_like(sums).scatter_add_(1, bins, torch.ones_like(blocks))
        levels.copy_(sums.div_(counts.clamp_(min=1)).view(-1))
        parts = bins.to(torch.uint8).view(4, -1)
        codes.copy_(parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        levels, codes = self._parts(encoded)
        bins = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)], -2).to(torch.int64)
        of_block = levels.to(torch.float32).unflatten(-1, (-1, LEVELS))
        bins = bins.view(*codes.shape[:-1], -1, BLOCK)
        into.unflatten(-1, (-1, BLOCK)).copy_(of_block.gather(-1, bins))

    def _parts(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        end = 2 * LEVELS * (encoded.shape[-1] // (BLOCK // 4 + 2 * LEVELS))
        return encoded[..., :end].view(torch.bfloat16), encoded[..., end:]


def register() -> None:
    """Make the format known to DiLoCo in this process."""
    if NAME in settings.WIRE_FORMATS:
        return
    make = wire_formats.make_wire_format
    settings.WIRE_FORMATS = cast(Any, (*settings.WIRE_FORMATS, NAME))
    field = settings.DiLoCoSettings.__dataclass_fields__["wire_format"]
    field.type = cast(Any, Literal[settings.WIRE_FORMATS])
    wire_sizes.SIZES[NAME] = wire_sizes.WireSize(2, block=BLOCK, scale=2 * LEVELS)
    quantized_mean.make_wire_format = lambda name: TwoBits() if name == NAME else make(name)
