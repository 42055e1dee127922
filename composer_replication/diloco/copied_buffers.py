"""Buffers that are not averaged: all groups take those of the first group of a sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.torchft_api import DiLoCoManager


def has_mean(buffer: Tensor) -> bool:
    """Whether a buffer is averaged: by its dtype alone, so that all groups decide alike.

    A float64 buffer is not: the mean is of float32 numbers, and a counter would stand still.
    """
    return buffer.is_floating_point() and buffer.dtype != torch.float64


class CopiedBuffers:
    """The buffers of a fragment as the first group of each sync has them.

    Integer, boolean and float64 buffers have no mean: every group takes over those of the first
    group. If that one contributes nothing to the sync, all go back to the global values. Another
    floating-point buffer is averaged, but a mask of -inf or a minimum that begins at inf has no
    mean either: while its global value is not finite, it is taken over too (ADR-054).

    The bytes of all buffers travel as one message beside those of the mean: a sum to which all
    other groups add zeros. So the message's size depends on the model alone, and never on values. A
    model without buffers sends no such message.

    Args:
        live: The model's buffers without a mean, by name.
        averaged: Those that are averaged.

    Attributes:
        live: The same.
        values: Their global values by name, in host memory, in the dtypes of the model.
    """

    def __init__(self, live: Mapping[str, Tensor], averaged: Sequence[Tensor]) -> None:
        self.live = live
        self.values: dict[str, Tensor] = {}
        for name, buffer in live.items():
            self.values[name] = buffer.detach().to("cpu", copy=True)
        self._num_averaged = len(averaged)
        self._like = [*averaged, *live.values()]
        self._message = Tensor()

    def send(
        self,
        manager: DiLoCoManager,
        device: torch.device,
        own: Iterable[Tensor],
    ) -> list[Any]:
        """Start the message's allreduce, and return its Work; nothing without buffers.

        Args:
            manager: In a quorum.
            device: Where the message is summed.
            own: This group's buffers, first those that are averaged. All groups may take them over
                if this group is the first one of the quorum.
        """
        if not self._like:
            return []
        parts = [buffer.reshape(-1).view(torch.uint8) for buffer in own]
        message = torch.cat(parts)
        self._message = message.to(device)
        if manager.participating_rank() != 0:
            self._message.zero_()
        return [manager.allreduce(self._message, reduce_op=ReduceOp.SUM)]  # pyright: ignore[reportArgumentType]

    def take(self) -> list[Tensor]:
        """After the vote: make what was sent last global, and write it into the model.

        Returns:
            The first group's buffers that are averaged, in the model's dtypes and shapes.
        """
        message = self._message.cpu()
        received: list[Tensor] = []
        start = 0
        for like in self._like:
            part = message[start : start + like.nbytes].clone()
            start += like.nbytes
            buffer = part.view(like.dtype)
            received.append(buffer.view(like.shape))
        count = self._num_averaged
        for value, buffer in zip(self.values.values(), received[count:], strict=True):
            value.copy_(buffer)
        self.write_back()
        return received[:count]

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the global values into the model."""
        for name, buffer in self.live.items():
            buffer.copy_(self.values[name])
