"""The losses of a trainer's steps, added up where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_replication.replica.ranks import world_size


class Losses:
    """Adds up losses on their device, for which no step waits.

    Attributes:
        num_steps: Steps since the last mean; a trainer counts them, since one may have
            several losses that are a part of its own each.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss, or a part of the loss of a step."""
        own = loss.detach().float()
        self._sum = own if self._sum is None else self._sum + own

    def pop_mean(self) -> float | None:
        """The mean loss of the steps since the last call, over the group's ranks; None if none."""
        own = self._pop_own()
        if own is not None and torch.distributed.is_initialized():
            own = own / world_size()
            torch.distributed.all_reduce(own)
        return None if own is None else own.item()

    def pop_own_mean(self) -> float | None:
        """The same of this rank alone, which waits for no other."""
        own = self._pop_own()
        return None if own is None else own.item()

    def _pop_own(self) -> Tensor | None:
        total = self._sum
        num_steps = self.num_steps
        self._sum = None
        self.num_steps = 0
        return None if total is None or not num_steps else total / num_steps
