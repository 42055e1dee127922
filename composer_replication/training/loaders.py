"""Loads text, or any dataset, for one rank of a replica group, from that group's shard of it.

Composer's own sampler gives every replica group the same samples, since each group is a job of its
own. The sampler here knows the group as well as the rank inside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchft.data import DistributedSampler

from composer_replication.arguments import takes
from composer_replication.data.loader import MapStyle, ReplicaDataLoader
from composer_replication.training.text_files import Split, check_text_folder


@dataclass(frozen=True, kw_only=True)
class ShardArguments:
    """What the loaders have in common. A config's are checked where it is read.

    Args:
        batch_size: Samples per batch and device.
        split: "train" or "eval".
        shuffle: Whether the order changes every epoch. None: for "train" only.
        seed: Seed of the order. It has to be equal in all groups, else their shards overlap.
        drop_last: Whether to leave out what does not fill a batch on every rank, so that no sample
            comes twice. None: for "train" only, since Composer removes doubled samples from
            metrics.
        num_workers: Processes that read ahead. A dataset in memory is fast with 0.
        shards: "fixed" or "leased". Unused by "eval".
        unit_size: Samples that are leased together.
        replica_rank: The group's number, from 0. Unused by "eval".
        num_replica_groups: The largest number of groups there will be. Unused by "eval".
    """

    batch_size: int
    split: Split = "train"
    shuffle: bool | None = None
    seed: int = 0
    drop_last: bool | None = None
    num_workers: int = 0
    shards: Literal["fixed", "leased"] = "fixed"
    unit_size: int = 512
    replica_rank: int = 0
    num_replica_groups: int = 1

    @property
    def is_leased(self) -> bool:
        """Whether the samples are leased from the coordinator."""
        return self.split == "train" and self.shards == "leased"


@dataclass(frozen=True, kw_only=True)
class TextArguments(ShardArguments):
    """All arguments of ``build_text_loader``.

    Args:
        path: The folder. None: the running Python's standard library.
        max_seq_len: Bytes in one sample.
    """

    path: str | None = None
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class DatasetArguments(ShardArguments):
    """All arguments of ``build_dataset_loader``.

    Args:
        dataset: Map-style, or a ``StreamingDataset``.
        dataset_id: Its name with ``shards: leased``, see :class:`ReplicaDataLoader`.
        collate_fn: See ``torch.utils.data.DataLoader``, as for the next.
        pin_memory: Whether batches are put into pinned memory.
    """

    dataset: Any
    dataset_id: str | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False


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
        dataset_id=options.dataset_id,
        collate_fn=options.collate_fn,
        pin_memory=options.pin_memory,
    )


def shard(
    dataset: Dataset[Any], options: ShardArguments, *, dataset_id: str | None, **of_torch: Any
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


class TextBytes(Dataset[dict[str, torch.Tensor]]):
    """The bytes of a folder's text files, cut into windows that do not overlap.

    A sample is ``{"input_ids", "labels"}``, both int64 of shape (max_seq_len,). A label is the byte
    that follows its input, so it is already shifted. Neighbouring windows therefore share one byte:
    the last label of the first is the first input of the second. Bytes after the last full window
    are unused.

    Args:
        path: The folder. None: the running Python's standard library.
            :func:`~composer_replication.training.text_files.check_text_folder` says which files
            count as text.
        max_seq_len: Bytes in one sample.
        split: "train", or "eval" for the held-out files.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder holds no text, too little, or too much.
    """

    def __init__(
        self, path: str | Path | None = None, *, max_seq_len: int, split: Split = "train"
    ) -> None:
        folder = check_text_folder(path, max_seq_len=max_seq_len)
        # bytearray: torch warns about a read-only buffer.
        self._bytes = torch.frombuffer(bytearray(folder.read_bytes(split)), dtype=torch.uint8)
        self.max_seq_len = max_seq_len

    @property
    def name(self) -> str:
        """A name that is equal wherever the samples are equal, on any machine and in any folder."""
        digest = hashlib.sha256(self._bytes.numpy().data).hexdigest()[:16]
        return f"text {digest} by {self.max_seq_len}"

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self.max_seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.max_seq_len
        window = self._bytes[start : start + self.max_seq_len + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


@takes(TextArguments)
def build_text_loader(**arguments: Any) -> DataLoader:
    """Build a loader over :class:`TextBytes` for this rank of this replica group.

    :func:`shard` says how groups share the windows.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: An argument is impossible, or the text does not fill one batch.
    """
    options = TextArguments(**arguments)
    text = TextBytes(options.path, max_seq_len=options.max_seq_len, split=options.split)
    return shard(text, options, dataset_id=text.name if options.is_leased else None)
