"""Dividing a dataset without a coordinator: each replica group has units of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

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
        num_units = -(-dataset.length // dataset.unit_size)
        if num_units < num_replicas:
            raise ValueError(
                f"{dataset.length} samples in units of unit_size={dataset.unit_size} are "
                f"{num_units} units for num_replicas={num_replicas} groups: use a unit_size "
                f"of at most {max(1, dataset.length // num_replicas)}"
            )
        self._leases = _leases(dataset, num_units, slice(replica_rank, None, num_replicas))
        self._newest = next(self._leases)

    @classmethod
    def of_group(cls, options: ReplicaOptions, dataset: DatasetSpec) -> FixedShards:
        """The shards of the group that ``options`` names.

        Raises:
            ValueError: The group's name is no number, or there are fewer units than groups.
        """
        num_replicas = options.num_replicas or 1
        return cls(dataset, shard_of(replica_id_of(options), num_replicas), num_replicas)

    def lease(self, number: int, epoch: int) -> Lease:
        """The lease of a number, in ascending order; an empty one follows those of each epoch."""
        del epoch  # the number of the lease tells the epoch
        while self._newest.number < number:
            self._newest = next(self._leases)
        return self._newest


def _leases(dataset: DatasetSpec, num_units: int, shard: slice) -> Iterator[Lease]:
    number = samples = 0
    for epoch in itertools.count():
        draw = random.Random(f"{dataset.seed} {epoch}").random
        keys = [draw() for _ in range(num_units)]
        order = sorted(range(num_units), key=keys.__getitem__)
        sizes = [(unit, dataset.size_of(unit)) for unit in order[shard]]
        for unit, size in (*sizes, (0, 0)):
            yield Lease(number, epoch, unit, 0, size, samples)
            number += 1
            samples += size


def shard_of(replica_id: str | int, num_replicas: int) -> int:
    """The number of the shard that a group reads, which is its replica id.

    Raises:
        ValueError: The id is not a number below ``num_replicas``.
    """
    if not str(replica_id).isdecimal() or int(replica_id) >= num_replicas:
        raise ValueError(
            f"replica_id={replica_id!r} does not say which shard of the data is this group's: "
            f"number the {num_replicas} groups 0 to {num_replicas - 1}, or raise num_replicas "
            "(NUM_REPLICA_GROUPS), or lease the samples from a coordinator"
        )
    return int(replica_id)
