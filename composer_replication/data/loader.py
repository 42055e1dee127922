"""A DataLoader whose samples are shared out between replica groups, and none is read twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from composer.utils import dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from composer_replication.coordinator.wire_types import DatasetSpec
from composer_replication.data.sample_stream import Place, Source, StreamReader


class ReplicaDataLoader(DataLoader):
    """Shares a map-style dataset between replica groups, their ranks and their workers.

    Under a coordinator the groups lease units of samples from it: what a dead group has not brought
    into the model goes to others, and each sample of an epoch is in the model once. Without one
    every group has a fixed share of the units. Give it to Composer's ``Trainer`` beside a
    ``DiLoCoCallback``, which connects it; before training it gives nothing.

    How many batches of an epoch a group gets is not known before: ``len`` is a bound, as if it got
    all of them, so state schedules in batches. Where nothing is left of an epoch, a group's last
    batch may be smaller, and with several ranks some of its samples may be in it twice, so that all
    ranks have as many.

    Args:
        dataset: With ``__getitem__`` and a length; a ``streaming.StreamingDataset`` will do.
        batch_size: Samples per batch and rank.
        dataset_id: Its name, by which all groups mean the same data.
        unit_size: Samples that are leased together, contiguous in the dataset. A group trains on
            one and has the next one ready, so it goes on that long without the coordinator.
        seed: Of the order of the units, new in each epoch, and of the samples in them.
        shuffle: Whether the samples of a unit are shuffled; the units always are.
        collate_fn: See ``DataLoader``, as for what follows.
        num_workers: Processes that read ahead.
        pin_memory: Whether batches are put into pinned memory.
        prefetch_factor: Batches that each of them reads ahead.

    Attributes:
        spec: What the groups have to agree on.
        place: Where in the stream the samples of the last batch end.
        before: Where they begin, until it is known that the batch has been trained on; else None.

    Raises:
        ValueError: A size is below 1, or the dataset has no length.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        dataset_id: str,
        unit_size: int = 512,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("unit_size", unit_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        samples = MapStyle(dataset) if isinstance(dataset, IterableDataset) else dataset
        length = len(samples)  # pyright: ignore[reportArgumentType]
        if not length:
            raise ValueError(f"the dataset {dataset_id!r} has no samples")
        self.spec = DatasetSpec(dataset_id, length, seed, unit_size, shuffle)
        self.place = Place()
        self.before: Place | None = None
        self.is_closed = False
        self._samples = StreamSampler(samples, batch_size)
        self._to_skip: int | None = None
        self._changes_stream = False
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

    def read(self, source: Source, place: Place, has_more: Callable[[], bool]) -> None:
        """Read a stream from a place on, from the next batch on.

        Args:
            source: Of the stream's leases.
            place: Where to begin.
            has_more: Asked on every rank when the stream pauses: whether to go on in this epoch.
        """
        self._changes_stream = self._samples.reader is not None
        self._samples.reader = StreamReader(self.spec, source, place)
        self._samples.marks.clear()
        self.place, self._has_more, self.is_closed = place, has_more, False
        self.before = None

    @property
    def reader(self) -> StreamReader | None:
        """What reads the stream."""
        return self._samples.reader

    def __len__(self) -> int:
        """More batches of an epoch than any group can get: Composer stops there."""
        of_ranks = self._samples.batch_size * self._samples.num_replicas
        num_units = -(-self.spec.length // self.spec.unit_size)
        return -(-self.spec.length // of_ranks) + num_units  # each may end in a smaller batch

    def pause(self) -> None:
        """Give nothing until ``begin``: Composer looks at a batch of each epoch that has been."""
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
            yield None  # not read again: the place in the stream says where to go on
        while True:
            yield from self._until_pause()
            if self._changes_stream:
                continue
            self.is_closed = self._samples.reader.is_closed
            self.place, self.before = self._samples.reader.place, None
            if not self._has_more():
                return

    def _until_pause(self) -> Iterator[Any]:
        self._changes_stream = False
        self._samples.marks.clear()
        for batch in super().__iter__():
            self.before, self.place = self.place, self._samples.marks.popleft()
            yield batch
            if self._changes_stream:
                return  # what the workers have read ahead is of the stream before


class StreamSampler(DistributedSampler[int]):
    """Reads a stream: this rank's part of each of the group's batches.

    A ``DistributedSampler`` by name alone, since Composer wants one where there are several ranks.
    It is read ahead by the loader's workers, so it keeps where each batch ends for when that is
    trained on.

    Args:
        dataset: Of the samples.
        batch_size: Samples per batch and rank.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        super().__init__(dataset, dist.get_world_size(), dist.get_global_rank(), shuffle=False)
        self.batch_size = batch_size
        self.reader: StreamReader | None = None
        self.marks: deque[Place] = deque()

    def __iter__(self) -> Iterator[int]:
        """The samples up to the next pause of the stream."""
        assert self.reader is not None, "the loader has seen to it"
        reader, count = self.reader, self.batch_size * self.num_replicas
        while taken := reader.take(count, self.epoch):
            while len(taken) % self.num_replicas:
                taken.append(taken[0])
            self.marks.append(reader.place)
            yield from taken[self.rank :: self.num_replicas]


class MapStyle(Dataset[Any]):
    """An iterable dataset that can also be indexed, such as StreamingDataset, as one to be indexed.

    Args:
        dataset: The dataset.

    Raises:
        ValueError: It cannot be indexed.
    """

    def __init__(self, dataset: Any) -> None:
        if type(dataset).__getitem__ is Dataset.__getitem__:  # which raises
            raise ValueError(
                f"{type(dataset).__name__} can only be iterated, so its samples cannot be shared "
                "out: use a map-style dataset, or a StreamingDataset"
            )
        self._dataset = dataset

    def __len__(self) -> int:
        # The length of a StreamingDataset is that of a rank's share.
        return int(getattr(self._dataset, "num_samples", None) or len(self._dataset))

    def __getitem__(self, index: int) -> Any:
        return cast(Any, self._dataset)[index]
