"""Other formats of 4 bits, to compare fp4 with: floating point in each element."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_formats import SMALLEST, Fp4

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

    def encode(self, values: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(into, values.numel())
        blocks = self._blocks(values)
        largest = blocks.abs().amax(1)
        if not self._has_blocks:
            largest = largest.max().expand_as(largest).contiguous()
        sizes = blocks.abs() / self._write_scales(largest, head, scales)
        code = torch.bucketize(sizes.view(-1), (self._levels[1:] + self._levels[:-1]) / 2)
        low, high = (code | (values < 0).int() << 3).to(torch.int8).view(2, -1)
        codes.copy_(high << 4 | low)

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        head, scales, codes = self._split(encoded, into.numel())
        for half, code in zip(into.view(2, -1), (codes & 15, codes >> 4 & 15), strict=True):
            size = self._levels[(code & 7).int()]
            half.copy_(torch.where(code & 8 > 0, -size, size))
        self._blocks(into.view(-1)).mul_(self._as_scale(scales, head))

    def _write_scales(self, largest: Tensor, head: Tensor, scales: Tensor) -> Tensor:
        """Write each block's scale, rounded up from its largest magnitude. Returns it decoded."""
        bits = largest.clamp(min=SMALLEST).view(torch.int32)
        rounded = (bits + 2**self._scale_shift - 1) >> self._scale_shift
        head.copy_(rounded.max() - 255)
        scales.copy_((rounded - head).clamp_(min=0))
        return self._as_scale(scales, head)

    def _as_scale(self, scales: Tensor, head: Tensor) -> Tensor:
        bits = scales.int().add_(head).bitwise_left_shift_(self._scale_shift)
        return bits.view(torch.float32).unsqueeze(1)
