"""The 4-bit format of Streaming DiLoCo (arXiv 2501.18512, section 3.4), to compare fp4 with."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_replication.diloco.wire import Fp4

LEVELS = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
"""E3M0: a zero and seven powers of two, with a sign; here up to 1."""


class E3M0(Fp4):
    """The same bytes and scales as ``Fp4``, with powers of two for its eight sizes."""

    name = "fp4"
    _largest = 1.0

    def _codes(self, values: Tensor, factor: Tensor) -> Tensor:
        size = values.view(-1, self._block).abs().mul_(factor).view(-1)
        code = torch.bucketize(size, (LEVELS[1:] + LEVELS[:-1]) / 2, out_int32=True)
        sign = values.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
        return code.bitwise_or_(sign)

    def _values(self, nibbles: Tensor, factor: Tensor, into: Tensor) -> None:
        size = LEVELS[nibbles & 7]
        into.copy_(torch.where(nibbles > 7, -size, size))
        into.view(-1, self._block).mul_(factor)


class E3M0OfOneScale(E3M0):
    """With one scale for all of a message."""

    def _largest_of_blocks(self, values: Tensor) -> Tensor:
        blocks = values.numel() // self._block
        return values.abs().max().clamp_(min=1e-30).expand(blocks)
