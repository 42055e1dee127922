"""The fixed part of a dataset that is one group's, for a trainer with loaders of its own."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, Subset

from composer_replication.options import ReplicaOptions, replica_id_of


def replica_shard(dataset: Any) -> Any:
    """The part of a dataset that this replica group trains on: every k-th sample of k groups.

    The ranks of the group divide it further, as their trainer always does.

    Args:
        dataset: A ``datasets.Dataset`` or ``datasets.IterableDataset``, or any other with a length
            and an index. All groups have to pass the same one.

    Raises:
        ValueError: ``REPLICA_GROUP_ID`` is not a number below ``NUM_REPLICA_GROUPS``, or the
            dataset can only be iterated and is not one of ``datasets``.
    """
    options = ReplicaOptions().with_environment()
    name, count = replica_id_of(options), options.num_replicas or 1
    if not name.isdecimal() or int(name) >= count:
        raise ValueError(
            f"REPLICA_GROUP_ID={name!r} does not say which part of the data is this group's: "
            f"number the {count} groups 0 to {count - 1}"
        )
    if isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "shard"):
            raise ValueError(
                f"{type(dataset).__name__} can only be iterated, so its samples cannot be divided "
                f"between groups: yield every {count}-th in its __iter__, and give it without "
                "replica_shard"
            )
        from datasets.distributed import (  # pyright: ignore[reportMissingImports]
            split_dataset_by_node,
        )

        return split_dataset_by_node(dataset, int(name), count)
    # Each group gets the same number of samples.
    own = range(int(name), len(dataset) - len(dataset) % count, count)
    return dataset.select(own) if hasattr(dataset, "select") else Subset(dataset, own)
