"""A replica group's stream of samples: units, one after the other, that somebody gives out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from composer_replication.coordinator.wire_types import DatasetSpec, Lease


class Source(Protocol):
    """Gives out the leases of one stream."""

    def lease(self, number: int, epoch: int) -> Lease:
        """The lease of a number, the same whenever any rank of the group asks for it.

        A new one is of ``epoch``, or of what has come back of an earlier one.
        """
        ...


@dataclass(frozen=True)
class Place:
    """A place in a stream: after ``position`` samples, which is in the lease of that number."""

    number: int = 0
    position: int = 0


class StreamReader:
    """Reads a stream, with the next lease always on its way.

    Args:
        dataset: Whose samples.
        source: Of the leases.
        place: Where to begin.
    """

    def __init__(self, dataset: DatasetSpec, source: Source, place: Place) -> None:
        self._dataset = dataset
        self._source = source
        self._number, self._position = place.number, place.position
        self._current: list[int] = []
        self._next: Future[Lease] | None = None
        self.is_closed = False
        """Whether the stream has been given to others: this group has fallen behind."""

    @property
    def place(self) -> Place:
        """Where it stands."""
        return Place(self._number, self._position)

    def take(self, count: int, epoch: int) -> list[int]:
        """The next samples: fewer than ``count`` where the stream pauses, and then none, once."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._current and not self._open_next(epoch):
                if not taken:  # else the pause is behind them: who resumes from here gets there
                    self._pass_pause()
                return taken
            part = self._current[: count - len(taken)]
            self._current = self._current[len(part) :]
            self._position += len(part)
            taken += part
            if not self._current:
                self._number += 1
        return taken

    def _open_next(self, epoch: int) -> bool:
        while not self._current:
            if self._next is None:
                self._next = self._ask(self._number, epoch)
            lease = self._next.result()
            if lease.is_empty:
                return False
            self._next = self._ask(self._number + 1, epoch)
            # All of it, unless this is where a resume begins.
            self._current = self._dataset.samples(lease)[self._position - lease.stream_start :]
            if not self._current:
                self._number += 1
        return True

    def _pass_pause(self) -> None:
        assert self._next is not None, "it has just been found"
        is_open = self._next.result().is_open
        self._next = None
        self._number += is_open  # the pause of a closed stream is no part of it
        self.is_closed = not is_open

    def _ask(self, number: int, epoch: int) -> Future[Lease]:
        return in_background(lambda: self._source.lease(number, epoch))


def in_background(call: Callable[[], Lease]) -> Future[Lease]:
    """Start a call on a thread of its own, for which no process waits when it ends."""
    future: Future[Lease] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="lease", daemon=True).start()
    return future
