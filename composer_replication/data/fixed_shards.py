"""Sharing a dataset without a coordinator: each replica group has units of its own."""

from __future__ import annotations

import random
from functools import lru_cache

from composer_replication.coordinator.wire_types import DatasetSpec, Lease


class FixedShards:
    """Gives a replica group every ``num_replicas``-th unit of each epoch, shuffled anew each time.

    A group that is not there leaves its units unread, and one that joins without a checkpoint
    begins its own from the start.

    Args:
        dataset: Which is shared.
        replica_rank: Which group this is, from 0.
        num_replicas: Between how many it is shared.

    Raises:
        ValueError: There are fewer units than groups.
    """

    def __init__(self, dataset: DatasetSpec, replica_rank: int, num_replicas: int) -> None:
        self._dataset = dataset
        self._rank, self._num_replicas = replica_rank, num_replicas
        self._num_units = -(-dataset.length // dataset.unit_size)
        if self._num_units < num_replicas:
            raise ValueError(
                f"{dataset.length} samples in units of unit_size={dataset.unit_size} are "
                f"{self._num_units} units for num_replicas={num_replicas} groups: use a unit_size "
                f"of at most {max(1, dataset.length // num_replicas)}"
            )
        self._units = lru_cache(maxsize=64)(self._own_units)
        self._num_own = -(-(self._num_units - replica_rank) // num_replicas)

    def lease(self, number: int, epoch: int) -> Lease:
        """The lease of a number; after each epoch's units comes an empty one."""
        epoch, place = divmod(number, self._num_own + 1)  # whatever epoch was asked for
        units = self._units(epoch)
        start = sum(self._size(self._units(earlier)) for earlier in range(epoch))
        start += self._size(units[:place])
        if place == self._num_own:
            return Lease(number, epoch, 0, 0, 0, start)
        return Lease(number, epoch, units[place], 0, self._size(units[place : place + 1]), start)

    def _own_units(self, epoch: int) -> list[int]:
        draw = random.Random(f"{self._dataset.seed} {epoch}").random
        keys = [draw() for _ in range(self._num_units)]
        order = sorted(range(self._num_units), key=keys.__getitem__)
        return order[self._rank :: self._num_replicas]

    def _size(self, units: list[int]) -> int:
        """Samples in some units of an epoch: the dataset's last unit may be a short one."""
        missing = self._num_units * self._dataset.unit_size - self._dataset.length
        return len(units) * self._dataset.unit_size - missing * (self._num_units - 1 in units)
