"""The arguments of the loaders that a config names. Imports neither torch nor Composer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from composer_replication.training.text_files import Split

SHARDS = ("fixed", "leased")


@dataclass(frozen=True, kw_only=True)
class ShardArguments:
    """What the loaders have in common.

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

    Raises:
        ValueError: A value is out of range.
    """

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

    Raises:
        ValueError: A value is out of range.
    """

    path: str | None = None
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class DatasetArguments(ShardArguments):
    """All arguments of ``build_dataset_loader``.

    Args:
        dataset: Map-style, or a ``StreamingDataset``.
        dataset_id: Its name with ``shards: leased``, the same in all groups.
        collate_fn: See ``torch.utils.data.DataLoader``, as for the next.
        pin_memory: Whether batches are put into pinned memory.

    Raises:
        ValueError: A value is out of range, or samples are leased and ``dataset_id`` is missing.
    """

    dataset: Any
    dataset_id: str | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_leased and not self.dataset_id:
            raise ValueError(
                "shards: leased needs a dataset_id: a name of the dataset, the same in all groups, "
                "and another one if the data change"
            )
