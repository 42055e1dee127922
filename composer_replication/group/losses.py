"""The losses of a trainer's steps, added up where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from composer_replication.replica.ranks import world_size


class Losses:
    """Adds up losses on their device, for which no step waits.

    Args:
        of_all_ranks: Whether a mean is over all ranks of the group, which wait for each other then.

    Attributes:
        num_steps: Steps since the last mean; a trainer counts them, since one may have
            several losses that are a part of its own each.
    """

    def __init__(self, *, of_all_ranks: bool = True) -> None:
        self.num_steps = 0
        self._of_all_ranks = of_all_ranks
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        """Add a loss, or a part of the loss of a step."""
        own = loss.detach().float()
        self._sum = own if self._sum is None else self._sum + own

    def pop_mean(self) -> float | None:
        """The mean loss of the steps since the last call; None if there were none."""
        total = self._sum
        num_steps = self.num_steps
        self._sum = None
        self.num_steps = 0
        if total is None or not num_steps:
            return None
        mean = total / num_steps
        if self._of_all_ranks and torch.distributed.is_initialized():
            mean /= world_size()
            torch.distributed.all_reduce(mean)
        return mean.item()
