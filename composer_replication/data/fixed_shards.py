"""Dividing a dataset without a coordinator: each replica group has units of its own."""

from __future__ import annotations

import random

from composer_replication.coordinator.wire_types import DatasetSpec, Lease
from composer_replication.options import ReplicaOptions, replica_id_of


class FixedShards:
    """Every ``num_replicas``-th unit of each epoch, in an order that is new in every epoch.

    The units of a group that is away stay unread, and a group that joins without a checkpoint
    begins its own from the start.

    Args:
        dataset: The dataset.
        replica_rank: Which group this is, from 0.
        num_replicas: Number of groups.

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
        self._leases: list[Lease] = []
        """The leases of one epoch."""
        # Where the epoch after that begins.
        self._epoch = self._number = self._samples = 0

    @classmethod
    def of_group(cls, options: ReplicaOptions, dataset: DatasetSpec) -> FixedShards:
        """The shards of the group that ``options`` names.

        Raises:
            ValueError: The group's name is no number, or there are fewer units than groups.
        """
        replica_id, num_replicas = replica_id_of(options), options.num_replicas or 1
        if not replica_id.isdecimal() or int(replica_id) >= num_replicas:
            raise ValueError(
                f"replica_id={replica_id!r} does not say which shard of the data is this group's: "
                f"number the {num_replicas} groups 0 to {num_replicas - 1}, or use a coordinator"
            )
        return cls(dataset, int(replica_id), num_replicas)

    def lease(self, number: int, epoch: int) -> Lease:
        """The lease of a number, in ascending order; an empty one follows those of each epoch."""
        del epoch  # the number says it
        while number >= self._number:
            self._begin_epoch()
        return self._leases[number - self._number]  # counted from the end

    def _begin_epoch(self) -> None:
        draw = random.Random(f"{self._dataset.seed} {self._epoch}").random
        keys = [draw() for _ in range(self._num_units)]
        order = sorted(range(self._num_units), key=keys.__getitem__)
        self._leases = []
        for unit in order[self._rank :: self._num_replicas]:
            self._add(unit, self._dataset.size_of(unit))
        self._add(0, 0)
        self._epoch += 1

    def _add(self, unit: int, size: int) -> None:
        self._leases.append(Lease(self._number, self._epoch, unit, 0, size, self._samples))
        self._number += 1
        self._samples += size
