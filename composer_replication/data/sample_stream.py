"""Which samples a replica group reads: a stream of units, leased or of a fixed shard.

For a trainer with loaders of its own, ``replica_shard`` is the fixed part of a dataset.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from composer_replication.coordinator.wire_types import DatasetSpec, Lease, shuffled
from composer_replication.diloco.equal_samples import digest_of_samples
from composer_replication.options import ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import await_on_rank_0, begin_on_rank_0

LeaseSource = Callable[[int, int], Lease]
"""A function that returns the lease of a number, the same for every call. Rank 0 calls it.

The second argument is an epoch: a new lease is from it, or from the rest of an earlier one.
"""


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream: ``samples`` come before it, and it is in the lease ``number``."""

    number: int = 0
    samples: int = 0


class StreamReader:
    """Reads a stream, on every rank. While it reads one lease, rank 0 asks for the next one.

    Args:
        dataset: Whose samples.
        source: Of the leases.
        position: Where to begin.
        note_wait: Called now and then while the reader waits for a lease.

    Attributes:
        is_closed: Whether the coordinator has closed the stream, because the other groups have
            committed a sync without this one.
    """

    def __init__(
        self,
        dataset: DatasetSpec,
        source: LeaseSource,
        position: StreamPosition,
        note_wait: Callable[[], object] = bool,
    ) -> None:
        self._dataset = dataset
        self._source = source
        self._note_wait = note_wait
        self._number = position.number
        self._samples = position.samples
        self._current: deque[int] = deque()
        self._next: Future[Lease] | None = None
        self.is_closed = False

    @property
    def position(self) -> StreamPosition:
        """The position after the samples that were read last."""
        return StreamPosition(self._number, self._samples)

    def read(self, count: int, epoch: int) -> list[int]:
        """The next samples: fewer than ``count`` where the stream pauses, and then none, once."""
        samples: list[int] = []
        while len(samples) < count:
            if not self._current and (pause := self._open_next(epoch)):
                if not samples:  # else the pause comes next, also for a group that resumes here
                    self._next = None
                    self._number += pause.is_open  # that of a closed stream is no part of it
                    self.is_closed = not pause.is_open
                return samples
            samples.append(self._current.popleft())
            self._samples += 1
            if not self._current:
                self._number += 1
        return samples

    def _open_next(self, epoch: int) -> Lease | None:
        """Open the next lease. Returns the one at which the stream pauses, if it is next."""
        while not self._current:
            if self._next is None:
                self._next = self._ask(self._number, epoch)
            lease = await_on_rank_0(self._next, self._note_wait)
            if lease.start == lease.stop:  # the stream pauses here
                return lease
            self._next = self._ask(self._number + 1, epoch)
            # All of it, unless this is where a resume begins.
            rest = self._dataset.samples(lease)[self._samples - lease.stream_start :]
            self._current.extend(rest)
            if not rest:
                self._number += 1
        return None

    def _ask(self, number: int, epoch: int) -> Future[Lease] | None:
        """Ask for a lease, on rank 0.

        The coordinator may lose its state at any moment. If each rank asked, one could get a lease
        and another a pause, and they would wait for each other in different collectives.
        """
        return begin_on_rank_0(partial(self._source, number, epoch))


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
        if dataset.num_units < num_replicas:
            raise ValueError(
                f"{dataset.length} samples in units of unit_size={dataset.unit_size} are "
                f"{dataset.num_units} units for num_replicas={num_replicas} groups: use a "
                f"unit_size of at most {max(1, dataset.length // num_replicas)}"
            )
        self._leases = _leases(dataset, slice(replica_rank, None, num_replicas))
        self._newest = next(self._leases)

    def lease(self, number: int, epoch: int) -> Lease:
        """The lease of a number, in ascending order; an empty one follows those of each epoch."""
        del epoch  # the number of the lease tells the epoch
        while self._newest.number < number:
            self._newest = next(self._leases)
        return self._newest


def _leases(dataset: DatasetSpec, shard: slice) -> Iterator[Lease]:
    number = 0
    samples = 0
    for epoch in itertools.count():
        order = shuffled(dataset.num_units, f"{dataset.seed} {epoch}")
        for unit in order[shard]:
            size = dataset.size_of(unit)
            yield Lease(number, epoch, unit, 0, size, samples)
            number += 1
            samples += size
        yield Lease(number, epoch, 0, 0, 0, samples)
        number += 1


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
    count = options.num_replicas or 1
    number = shard_of(replica_id_of(options), count)
    _divided.append(dataset)
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

        how = {}
        if _counts_samples(dataset):
            # By files, each group would count for itself: take and skip would not meet any more.
            how["strategy"] = "examples"
            if "strategy" not in inspect.signature(split_dataset_by_node).parameters:
                raise ValueError(
                    "this stream counts samples (skip, take or with_indices) before replica_shard, "
                    "which needs datasets 5.1 or newer to divide it: upgrade it, or give "
                    "replica_shard the stream as it was loaded"
                )
        return split_dataset_by_node(dataset, number, count, **how)
    # Each group gets the same number of samples.
    own = range(number, len(dataset) - len(dataset) % count, count)
    return dataset.select(own) if hasattr(dataset, "select") else Subset(dataset, own)


def _counts_samples(dataset: Any) -> bool:
    """Whether a stream of ``datasets`` has a part that counts the samples so far."""
    return any(
        hasattr(part, "split_when_sharding") or getattr(part, "with_indices", False)
        for part in _parts_of(dataset)
    )


def _parts_of(part: Any) -> Iterator[Any]:
    """Yield a stream of ``datasets``, and all that it is made of."""
    yield part
    for name in ("_ex_iterable", "ex_iterable"):
        if (made_of := getattr(part, name, None)) is not None:
            yield from _parts_of(made_of)
    for each in getattr(part, "ex_iterables", ()):
        yield from _parts_of(each)


_divided: list[Any] = []
"""What ``replica_shard`` has divided, until its digest is asked for."""
_digests: set[str] = set()


def digests_of_divided() -> tuple[str, ...]:
    """Digests of what ``replica_shard`` has divided in this process: equal in all groups.

    It may draw from the random generators.
    """
    while _divided:
        _digests.add(_order_of(_divided.pop()))
    return tuple(sorted(_digests - {""}))


def _order_of(dataset: Any) -> str:
    """A digest of samples here and there; empty if they differ when they are read again."""
    if isinstance(dataset, IterableDataset):  # reading it may take long: how it is shuffled
        parts = _parts_of(dataset)
        return digest_of_samples([part.generator for part in parts if hasattr(part, "generator")])
    with contextlib.suppress(Exception):  # what cannot be read fails where it is trained on
        if content := content_of(dataset, len(dataset)):
            return f"{len(dataset)} {content}"
    return ""


def content_of(dataset: Any, length: int, num_workers: int = 0) -> str:
    """A digest of three samples; empty if they differ when they are read again.

    They are read where training reads them, since a dataset may open its files in a worker.
    """
    picked = [0, length // 2, length - 1]
    first, again = DataLoader(
        dataset,
        batch_size=len(picked),
        sampler=picked * 2,
        collate_fn=digest_of_samples,
        num_workers=min(num_workers, 1),
        generator=torch.Generator(),
    )
    return first[:16] if first == again else ""
