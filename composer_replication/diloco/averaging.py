"""The weighted mean over the quorum, in flat buckets of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of tensor number ``tensor``, flattened."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def plan_buckets(sizes: Sequence[int], capacity: int) -> list[list[Piece]]:
    """Cut tensors of ``sizes`` elements, in their order, into buckets of ``capacity`` elements.

    Every element is in exactly one piece; a tensor larger than a bucket spans several. (torchft's
    own bucketing drops those, and whatever a bucket's last tensor leaves over.)
    """
    buckets: list[list[Piece]] = [[]]
    room = capacity
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = capacity
            stop = min(size, start + room)
            buckets[-1].append(Piece(tensor, start, stop))
            room -= stop - start
            start = stop
    return buckets


class WeightedMean:
    """Computes ``sum(c_i * v_i) / sum(c_i)`` over the groups i of a quorum.

    ``c_i`` travels as the last element of every message, so that sum and divisor always come from
    the same members. A group with c_i = 0 sends zeros, whatever its values are: a joiner without
    training, or a group whose values are not finite, takes part and changes nothing.

    Args:
        sizes: Elements of each tensor, in the order that all groups share.
        bucket_cap_mb: Largest message in MiB of fp32.
    """

    def __init__(self, sizes: Sequence[int], bucket_cap_mb: float) -> None:
        self._buckets = plan_buckets(sizes, capacity=max(1, int(bucket_cap_mb * 2**20) // 4))
        self.messages: list[Tensor] = []
        self.num_bytes = 4 * (sum(sizes) + len(self._buckets))
        self.norm = 0.0

    @torch.no_grad()
    def form(
        self, value: Callable[[Piece], Tensor], contribution: float, device: torch.device
    ) -> None:
        """Build ``messages``, the 1-D fp32 tensors to be summed over the groups in place.

        ``norm`` then holds the L2 norm of the values, not finite if one of them is not.

        Args:
            value: Gives the fp32 elements of a piece, 1-D.
            contribution: c_i of this group. Becomes 0 if a value is not finite.
            device: Where the messages live.
        """
        self.messages = [
            torch.empty(sum(p.numel for p in pieces) + 1, device=device) for pieces in self._buckets
        ]
        for pieces, message in zip(self._buckets, self.messages, strict=True):
            offset = 0
            for piece in pieces:
                message[offset : offset + piece.numel] = value(piece)
                offset += piece.numel
        norms = [torch.linalg.vector_norm(message[:-1]) for message in self.messages]
        self.norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        for message in self.messages:
            if contribution and self.is_finite:
                message[:-1] *= contribution
                message[-1] = contribution
            else:
                message.zero_()

    @property
    def is_finite(self) -> bool:
        """Whether all values of the last ``form`` were finite."""
        # The norm of finite values overflows only past 1e19, where no training is left to save.
        return self.norm < float("inf")

    @torch.no_grad()
    def receive(self, into: Sequence[Tensor]) -> float:
        """Write the mean into ``into``, once the messages have been summed over the groups.

        Args:
            into: Contiguous fp32 tensors of ``sizes`` elements, on any device.

        Returns:
            ``sum(c_i)``. When it is 0 nobody contributed and ``into`` is left as it was.
        """
        messages, self.messages = self.messages, []
        total = float(messages[0][-1])
        if total == 0.0:
            return total
        flat = [tensor.view(-1) for tensor in into]
        for pieces, message in zip(self._buckets, messages, strict=True):
            message /= total
            offset = 0
            for piece in pieces:
                target = flat[piece.tensor][piece.start : piece.stop]
                target.copy_(message[offset : offset + piece.numel])
                offset += piece.numel
        return total
