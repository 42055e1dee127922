"""A replica group's stream of samples: leased units, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from composer_replication.coordinator.wire_types import DatasetSpec, Lease

LeaseSource = Callable[[int, int], Lease]
"""A function that returns the lease of a number, the same for every rank and every call.

The second argument is an epoch: a new lease is from it, or from the rest of an earlier one.
"""


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream: ``samples`` come before it, and it is in the lease ``number``."""

    number: int = 0
    samples: int = 0


class StreamReader:
    """Reads a stream. While it reads one lease, a thread asks for the next one.

    Args:
        dataset: Whose samples.
        source: Of the leases.
        position: Where to begin.

    Attributes:
        is_closed: Whether the coordinator has closed the stream, because the other groups have
            committed a sync without this one.
    """

    def __init__(self, dataset: DatasetSpec, source: LeaseSource, position: StreamPosition) -> None:
        self._dataset = dataset
        self._source = source
        self._number, self._samples = position.number, position.samples
        self._current: list[int] = []
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
            if not self._current and not self._open_next(epoch):
                if not samples:  # else the pause comes next, also for a group that resumes here
                    self._pass_pause()
                return samples
            part = self._current[: count - len(samples)]
            self._current = self._current[len(part) :]
            self._samples += len(part)
            samples += part
            if not self._current:
                self._number += 1
        return samples

    def _open_next(self, epoch: int) -> bool:
        while not self._current:
            if self._next is None:
                self._next = self._ask(self._number, epoch)
            lease = self._next.result()
            if lease.is_empty:
                return False
            self._next = self._ask(self._number + 1, epoch)
            # All of it, unless this is where a resume begins.
            self._current = self._dataset.samples(lease)[self._samples - lease.stream_start :]
            if not self._current:
                self._number += 1
        return True

    def _pass_pause(self) -> None:
        assert self._next is not None, "_open_next has asked for it"
        is_open = self._next.result().is_open
        self._next = None
        self._number += is_open  # the pause of a closed stream is no part of it
        self.is_closed = not is_open

    def _ask(self, number: int, epoch: int) -> Future[Lease]:
        # Not by an executor: the interpreter waits for an executor's threads when it exits, and
        # this one may be waiting for the coordinator.
        future: Future[Lease] = Future()

        def run() -> None:
            try:
                future.set_result(self._source(number, epoch))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="lease", daemon=True).start()
        return future
