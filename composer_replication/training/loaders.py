"""Loads text, or any dataset, for one rank of a replica group, from that group's shard of it.

Composer's own sampler gives every replica group the same samples, since each group is a job of its
own. The sampler here knows the group as well as the rank inside it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchft.data import DistributedSampler

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


def build_dataset_loader(**arguments: Any) -> DataLoader:
    """Build a loader over this rank's share of any dataset that can be indexed.

    "train" with shards "fixed": the samples are dealt to all ranks of all groups, in a new order
    every epoch. If a group is missing, its shard is not read.

    "train" with shards "leased": the groups lease samples from the coordinator, so that each one
    is trained on once an epoch even if groups die; see :class:`ReplicaDataLoader`. An epoch then
    has no length.

    "eval": every group reads all samples, sharded over its own ranks only. Their order is random
    and always the same, so that the first few batches (``eval_subset_num_batches``) are a fair
    sample and the same one at each evaluation.

    Raises:
        ValueError: An argument is impossible, or the dataset cannot be indexed or is too small.
    """
    own = DatasetArguments(**arguments)
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory")
    of_torch = {name: getattr(own, name) for name in names}
    is_train, dataset = own.split == "train", own.dataset
    if is_train and own.shards == "leased":
        return ReplicaDataLoader(
            dataset,
            dataset_id=own.dataset_id,
            unit_size=own.unit_size,
            seed=own.seed,
            shuffle=own.shuffle is not False,
            **of_torch,
        )
    if isinstance(dataset, IterableDataset):
        dataset = MapStyle(dataset)
    drop_last = is_train if own.drop_last is None else own.drop_last
    if not is_train:
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(own.seed))
        dataset = Subset(dataset, order.tolist())
    sampler = DistributedSampler(
        dataset,
        replica_rank=own.replica_rank if is_train else 0,
        num_replica_groups=own.num_replica_groups if is_train else 1,
        group_rank=dist.get_global_rank(),
        num_replicas=dist.get_world_size(),
        shuffle=is_train if own.shuffle is None else own.shuffle,
        seed=own.seed,
        drop_last=drop_last,
    )
    if drop_last and len(sampler) < own.batch_size:
        raise ValueError(
            f"split={own.split!r} has {len(sampler)} samples for each rank, less than one batch of "
            f"batch_size={own.batch_size}. Use more data, a smaller batch_size or drop_last=False."
        )
    return DataLoader(
        dataset,
        sampler=sampler,
        drop_last=drop_last,
        # A DataLoader draws from torch's default generator whenever it starts. Simulated replicas
        # are threads that share it: without a generator of its own, a loader's order would depend
        # on which thread came first.
        generator=torch.Generator().manual_seed(own.seed),
        **of_torch,
    )


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


def build_text_loader(
    *, max_seq_len: int, path: str | None = None, split: Split = "train", **others: Any
) -> DataLoader:
    """Build a loader over :class:`TextBytes` for this rank of this replica group.

    :func:`build_dataset_loader` says how groups share the windows.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: An argument is impossible, or the text does not fill one batch.
    """
    text = TextBytes(path, max_seq_len=max_seq_len, split=split)
    is_leased = split == "train" and others.get("shards") == "leased"
    name = text.name if is_leased else None  # the name needs a pass over the whole text
    return build_dataset_loader(dataset=text, dataset_id=name, split=split, **others)


build_dataset_loader.__signature__ = inspect.signature(DatasetArguments)  # pyright: ignore
build_text_loader.__signature__ = inspect.signature(TextArguments)  # pyright: ignore
