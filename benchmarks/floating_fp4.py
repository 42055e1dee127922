"""Other formats of 4 bits, to compare fp4 with: floating point in each element."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_replication.diloco.wire import Fp4

LEVELS = {
    "E3M0": [0.0, *(2.0**e for e in range(-6, 1))],  # Streaming DiLoCo's, arXiv 2501.18512
    "E2M1": [size / 6 for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)],
}
"""The eight sizes of a format, up to 1; each has a sign."""


class FloatingFp4(Fp4):
    """The same bytes and scales as ``Fp4``, with other sizes.

    Args:
        levels: A key of ``LEVELS``.
        has_blocks: Whether each block has its scale, or all of a message one.
    """

    _largest = 1.0

    def __init__(self, levels: str, has_blocks: bool = True) -> None:
        self._levels = torch.tensor(LEVELS[levels])
        self._has_blocks = has_blocks

    def _largest_of_blocks(self, values: Tensor) -> Tensor:
        if self._has_blocks:
            return super()._largest_of_blocks(values)
        return values.abs().max().clamp_(min=1e-30).expand(values.numel() // self._block)

    def _codes(self, values: Tensor, factor: Tensor) -> Tensor:
        size = values.view(-1, self._block).abs().mul_(factor).view(-1)
        code = torch.bucketize(size, (self._levels[1:] + self._levels[:-1]) / 2).to(torch.int8)
        return code.bitwise_or_((values < 0).to(torch.int8) << 3)

    def _values(self, codes: Tensor, factor: Tensor, into: Tensor) -> None:
        size = self._levels[(codes & 7).int()]
        into.copy_(torch.where(codes & 8 > 0, -size, size))
        into.view(-1, self._block).mul_(factor)
