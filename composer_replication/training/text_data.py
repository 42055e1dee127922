"""Loads samples of text for one rank of a replica group, from that group's shard of a folder.

Composer's own sampler gives every replica group the same samples, since each group is a job of its
own. The sampler here knows the group as well as the rank inside it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, Subset
from torchft.data import DistributedSampler

from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.diloco.arguments import takes
from composer_replication.training.text_files import Split, check_text_folder

SHARDS = ("fixed", "leased")


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


@dataclass(frozen=True, kw_only=True)
class TextArguments:
    """All arguments of :func:`build_text_loader`.

    Args:
        path: The folder. None: the running Python's standard library.
        max_seq_len: Bytes in one sample.
        batch_size: Samples per batch and device.
        split: "train" or "eval".
        shuffle: Whether the order changes every epoch. None: for "train" only.
        seed: Seed of the order. It has to be equal in all groups, else their shards overlap.
        drop_last: Whether to leave out what does not fill a batch on every rank, so that no sample
            comes twice. None: for "train" only, since Composer removes doubled samples from
            metrics.
        num_workers: Processes that read ahead. The text is in memory, so 0 is fast.
        shards: "fixed" or "leased". Unused by "eval".
        unit_size: Windows that are leased together.
        replica_rank: The group's number, from 0. Unused by "eval".
        num_replica_groups: The largest number of groups there will be. Unused by "eval".

    Raises:
        ValueError: A value is out of range.
    """

    path: str | None = None
    max_seq_len: int
    batch_size: int
    split: Split = "train"
    shuffle: bool | None = None
    seed: int = 0
    drop_last: bool | None = None
    num_workers: int = 0
    shards: str = "fixed"
    unit_size: int = 512
    replica_rank: int = 0
    num_replica_groups: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1.")
        if not 0 <= self.replica_rank < self.num_replica_groups:
            raise ValueError(
                f"replica_rank={self.replica_rank} is not one of num_replica_groups="
                f"{self.num_replica_groups}. Number the groups from 0 to "
                f"{self.num_replica_groups - 1}."
            )
        if self.shards not in SHARDS:
            raise ValueError(f"shards={self.shards!r}: use {' or '.join(SHARDS)}")


@takes(TextArguments)
def build_text_loader(**arguments: Any) -> DataLoader:
    """Build a loader over :class:`TextBytes` for this rank of this replica group.

    "train" with shards "fixed": the windows are dealt to all ranks of all groups, in a new order
    every epoch. If a group is missing, its shard is not read.

    "train" with shards "leased": the groups lease windows from the coordinator, so that each window
    is trained on once an epoch even if groups die; see :class:`ReplicaDataLoader`. An epoch then
    has no length.

    "eval": every group reads all held-out windows, sharded over its own ranks only. Their order is
    random and always the same, so that the first few batches (``eval_subset_num_batches``) are a
    fair sample and the same one at each evaluation.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: An argument is impossible, or the text does not fill one batch.
    """
    options = TextArguments(**arguments)
    split, batch_size, seed = options.split, options.batch_size, options.seed
    text = TextBytes(options.path, max_seq_len=options.max_seq_len, split=split)
    dataset: Dataset = text
    is_train = split == "train"
    if is_train and options.shards == "leased":
        return ReplicaDataLoader(
            text,
            batch_size,
            dataset_id=text.name,
            unit_size=options.unit_size,
            seed=seed,
            shuffle=options.shuffle is not False,
            num_workers=options.num_workers,
        )
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
            seed=seed,
            drop_last=drop_last,
        )
    else:
        dataset = _in_random_order(dataset, seed)
        sampler = dist.get_sampler(dataset, shuffle=shuffle, drop_last=drop_last, seed=seed)
    if drop_last and len(sampler) < batch_size:
        raise ValueError(
            f"split={split!r} has {len(sampler)} samples for each rank, less than one batch of "
            f"batch_size={batch_size}. Use more text, a smaller batch_size or drop_last=False."
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=options.num_workers,
        # A DataLoader draws from torch's default generator whenever it starts. Simulated replicas
        # are threads that share it: without a generator of its own, a loader's order would depend
        # on which thread came first.
        generator=torch.Generator().manual_seed(seed),
    )


def _in_random_order(dataset: TextBytes, seed: int) -> Subset:
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))
    return Subset(dataset, order.tolist())
