"""Buffers that have no mean: all groups have those of the first group of a sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.torchft_api import DiLoCoManager


def has_mean(buffer: Tensor) -> bool:
    """Whether a buffer is averaged: floating-point, and finite, as a mask of -inf is not."""
    return buffer.is_floating_point() and bool(buffer.isfinite().all())


class CopiedBuffers:
    """The buffers of a fragment that every group copies from the first group of each sync.

    Their bytes travel as one message beside those of the mean: a sum to which all other groups add
    zeros. A model without such buffers sends no such message.

    Args:
        live: The model's buffers by name.

    Attributes:
        live: The same.
        values: The global values by name, in host memory, in the dtypes of the model.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.live = live
        self.values = {name: t.detach().to("cpu", copy=True) for name, t in live.items()}
        self._message = torch.empty(0, dtype=torch.uint8)

    def send(
        self, manager: DiLoCoManager, device: torch.device, own: Iterable[Tensor] | None
    ) -> list[Any]:
        """Start the message's allreduce, and return its Work; nothing without such buffers.

        Args:
            manager: In a quorum.
            device: Where the message is summed.
            own: This group's values, which all groups take over if it is the first one of the
                quorum. None: it has not trained, and sends the global values again.
        """
        if not self.live:
            return []
        tensors = self.values.values() if own is None else own
        parts = [t.detach().reshape(-1).view(torch.uint8) for t in tensors]
        self._message = torch.cat(parts).to(device)
        if manager.participating_rank() != 0:
            self._message.zero_()
        return [manager.allreduce(self._message, reduce_op=ReduceOp.SUM)]  # pyright: ignore[reportArgumentType]

    def take(self) -> None:
        """After the vote: what was sent last becomes global, and is written into the model."""
        sizes = [value.nbytes for value in self.values.values()]
        for value, part in zip(self.values.values(), self._message.split(sizes), strict=True):
            value.copy_(part.clone().view(value.dtype).view(value.shape))
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        """Write the global values into the model."""
        for name, buffer in self.live.items():
            buffer.copy_(self.values[name])
