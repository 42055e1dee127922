"""A DataLoader that divides a dataset between replica groups, so that no sample is read twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from composer_replication.arguments import check_integer
from composer_replication.coordinator.wire_types import DatasetSpec
from composer_replication.data.sample_stream import (
    LeaseSource,
    StreamPosition,
    StreamReader,
    content_of,
)
from composer_replication.replica.ranks import rank, world_size


class ReplicaDataLoader(DataLoader):
    """Divides a map-style dataset between replica groups, their ranks and their workers.

    Under a coordinator the groups lease units of samples from it: samples of a dead group that are
    not in the model go to other groups, and each sample of an epoch is in the model once. Without a
    coordinator every group has a fixed shard of the units. Pass the loader to Composer's
    ``Trainer`` beside a ``DiLoCoCallback``, which connects it; before training it is empty.

    Nobody knows in advance how many batches of an epoch a group gets: ``len`` is an upper bound, as
    if it got all of them, so state schedules in batches. At the end of an epoch a group's last
    batch may be smaller, and with several ranks some samples may be in it twice, so that every rank
    has the same number.

    Args:
        dataset: With ``__getitem__`` and a length; a ``streaming.StreamingDataset`` will do.
        batch_size: Samples per batch and rank.
        dataset_id: Its name, the same in all groups. None: one of its class, its length and three
            of its samples.
        unit_size: Number of samples that are leased together, contiguous in the dataset. A group
            trains on one unit and already has the next one, so it can train on both without the
            coordinator.
        seed: Of the order of the units, which is new in each epoch, and of the samples in them.
        shuffle: Whether the samples of a unit are shuffled; the units always are.
        collate_fn: See ``DataLoader``, as for what follows.
        num_workers: Processes that read ahead.
        pin_memory: Whether batches are put into pinned memory.
        prefetch_factor: Batches that each of them reads ahead.

    Attributes:
        spec: What the groups have to agree on.
        position: The position in the stream after the last batch.
        position_before: The position before the last batch, until it has been trained on; else
            None.

    Raises:
        ValueError: A size is below 1, or the dataset has no length.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        dataset_id: str | None = None,
        unit_size: int = 512,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        check_integer("batch_size", batch_size, at_least=1)
        check_integer("unit_size", unit_size, at_least=1)
        samples = MapStyle(dataset) if isinstance(dataset, IterableDataset) else dataset
        length = len(samples)  # pyright: ignore[reportArgumentType]
        if not length:
            raise ValueError(f"{type(dataset).__name__} has no samples")
        if dataset_id is None:
            content = content_of(samples, length, num_workers) or "unknown"
            dataset_id = f"{type(dataset).__name__} {length} {content}"
        self.spec = DatasetSpec(dataset_id, length, seed, unit_size, shuffle)
        self.position = StreamPosition()
        self.position_before: StreamPosition | None = None
        self._samples = StreamSampler(samples, batch_size)
        self._to_skip: int | None = None
        self._has_more: Callable[[], bool] = lambda: False
        super().__init__(
            samples,
            batch_size=batch_size,
            sampler=self._samples,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            # It draws from a generator whenever it starts: not from torch's default one, of which
            # a resumed run would then draw another number of times.
            generator=torch.Generator().manual_seed(seed),
        )

    def read(
        self,
        source: LeaseSource,
        position: StreamPosition,
        has_more: Callable[[], bool],
        note_wait: Callable[[], object] = bool,
    ) -> StreamReader:
        """Read another stream, beginning with the next batch.

        Args:
            source: Of the stream's leases.
            position: Where to begin.
            has_more: Called on every rank when the stream pauses: whether to continue this epoch.
            note_wait: Called now and then while the loader waits for a lease.

        Returns:
            The stream's reader.
        """
        reader = StreamReader(self.spec, source, position, note_wait)
        self._samples.reader = reader
        self._samples.positions.clear()
        self.position = position
        self.position_before = None
        self._has_more = has_more
        return reader

    def __len__(self) -> int:
        """An upper bound of a group's batches in an epoch: Composer stops there."""
        of_ranks = self._samples.batch_size * self._samples.num_replicas
        # Each unit may end in a smaller batch.
        return -(-self.spec.length // of_ranks) + self.spec.num_units

    def pause(self) -> None:
        """Yield nothing until ``begin``: at a resume Composer reads a batch of each past epoch."""
        self._to_skip = None

    def begin(self, epoch: int, batches_done: int) -> None:
        """Composer is about to ask for a batch of an epoch, and will skip the first ones."""
        self._samples.set_epoch(epoch)
        self._to_skip = batches_done

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The batches of an epoch."""
        if self._to_skip is None or self._samples.reader is None:
            return
        for _ in range(self._to_skip):
            yield None  # not read again: the position in the stream says where to continue
        while True:
            reader = self._samples.reader
            self._samples.positions.clear()
            for batch in super().__iter__():
                self.position_before = self.position
                self.position = self._samples.positions.popleft()
                yield batch
                if self._samples.reader is not reader:
                    break  # the workers have read ahead in the stream before this one
            else:
                self.position = reader.position
                self.position_before = None
                if not self._has_more():
                    return


class StreamSampler(DistributedSampler[int]):
    """Reads a stream: this rank's part of each of the group's batches.

    It is a ``DistributedSampler`` because Composer requires one if there are several ranks. The
    loader reads it ahead for its workers, so it keeps the position after each batch until that
    batch is trained on.

    Args:
        dataset: The dataset.
        batch_size: Samples per batch and rank.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        super().__init__(dataset, world_size(), rank(), shuffle=False)
        self.batch_size = batch_size
        self.reader: StreamReader | None = None
        self.positions: deque[StreamPosition] = deque()

    def __iter__(self) -> Iterator[int]:
        """The samples up to the next pause of the stream."""
        assert self.reader is not None, "the loader has checked it"
        reader = self.reader
        count = self.batch_size * self.num_replicas
        while True:
            samples = reader.read(count, self.epoch)
            if not samples:
                return
            while len(samples) % self.num_replicas:
                samples.append(samples[0])
            self.positions.append(reader.position)
            yield from samples[self.rank :: self.num_replicas]


class MapStyle(Dataset[Any]):
    """Makes a map-style dataset of an iterable one that has an index, such as StreamingDataset.

    Args:
        dataset: The dataset.

    Raises:
        ValueError: It cannot be indexed.
    """

    def __init__(self, dataset: Any) -> None:
        if type(dataset).__getitem__ is Dataset.__getitem__:  # which raises
            raise ValueError(
                f"{type(dataset).__name__} can only be iterated, so its samples cannot be divided "
                "between groups: use a map-style dataset, or a StreamingDataset"
            )
        self._dataset = dataset

    def __len__(self) -> int:
        # A StreamingDataset's length is the number of samples of one rank.
        return int(getattr(self._dataset, "num_samples", None) or len(self._dataset))

    def __getitem__(self, index: int) -> Any:
        return cast(Any, self._dataset)[index]
