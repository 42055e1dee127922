"""Loads a dataset for one rank of a replica group, from that group's shard of it.

Composer's own sampler gives every replica group the same samples, since each group is a job of its
own. The sampler here knows the group as well as the rank inside it.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchft.data import DistributedSampler

from composer_replication.data.loader import MapStyle, ReplicaDataLoader
from composer_replication.diloco.arguments import takes
from composer_replication.training.loader_arguments import DatasetArguments, ShardArguments


@takes(DatasetArguments)
def build_dataset_loader(**arguments: Any) -> DataLoader:
    """Build a loader over any dataset that can be indexed, for this rank of this replica group.

    Raises:
        ValueError: An argument is impossible, or the dataset cannot be indexed or is too small.
    """
    options = DatasetArguments(**arguments)
    return shard(
        options.dataset,
        options,
        dataset_id=options.dataset_id or "",
        collate_fn=options.collate_fn,
        pin_memory=options.pin_memory,
    )


def shard(
    dataset: Dataset[Any], options: ShardArguments, *, dataset_id: str, **of_torch: Any
) -> DataLoader:
    """Build a loader over this rank's share of a dataset.

    "train" with shards "fixed": the samples are dealt to all ranks of all groups, in a new order
    every epoch. If a group is missing, its shard is not read.

    "train" with shards "leased": the groups lease samples from the coordinator, so that each one
    is trained on once an epoch even if groups die; see :class:`ReplicaDataLoader`. An epoch then
    has no length.

    "eval": every group reads all samples, sharded over its own ranks only. Their order is random
    and always the same, so that the first few batches (``eval_subset_num_batches``) are a fair
    sample and the same one at each evaluation.

    Args:
        dataset: Map-style, or a ``StreamingDataset``.
        options: How to divide it.
        dataset_id: Its name for the coordinator, if samples are leased.
        **of_torch: Further arguments of the ``DataLoader``.

    Raises:
        ValueError: The dataset cannot be indexed, or does not fill one batch.
    """
    if options.is_leased:
        return ReplicaDataLoader(
            dataset,
            options.batch_size,
            dataset_id=dataset_id,
            unit_size=options.unit_size,
            seed=options.seed,
            shuffle=options.shuffle is not False,
            num_workers=options.num_workers,
            **of_torch,
        )
    if isinstance(dataset, IterableDataset):
        dataset = MapStyle(dataset)
    is_train = options.split == "train"
    shuffle = is_train if options.shuffle is None else options.shuffle
    drop_last = is_train if options.drop_last is None else options.drop_last
    if is_train:
        sampler = DistributedSampler(
            dataset,
            replica_rank=options.replica_rank,
            num_replica_groups=options.num_replica_groups,
            group_rank=dist.get_global_rank(),
            num_replicas=dist.get_world_size(),
            shuffle=shuffle,
            seed=options.seed,
            drop_last=drop_last,
        )
    else:
        dataset = _in_random_order(dataset, options.seed)
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=options.seed)
    if drop_last and len(sampler) < options.batch_size:
        raise ValueError(
            f"split={options.split!r} has {len(sampler)} samples for each rank, less than one "
            f"batch of batch_size={options.batch_size}. Use more data, a smaller batch_size or "
            "drop_last=False."
        )
    return DataLoader(
        dataset,
        batch_size=options.batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=options.num_workers,
        # A DataLoader draws from torch's default generator whenever it starts. Simulated replicas
        # are threads that share it: without a generator of its own, a loader's order would depend
        # on which thread came first.
        generator=torch.Generator().manual_seed(options.seed),
        **of_torch,
    )


def _in_random_order(dataset: Any, seed: int) -> Subset:
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return Subset(dataset, order.tolist())
