"""The clock that measures what a sync costs training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from composer_replication.diloco.hang_watch import HangWatch


class SyncSeconds(NamedTuple):
    """Where the time between two committed syncs went, in seconds.

    Attributes:
        blocked: For which training was blocked.
        waited: The part of it spent waiting for the quorum.
        trained: The rest.
    """

    blocked: float
    waited: float
    trained: float

    @property
    def compute_fraction(self) -> float:
        """The fraction of the time that was spent training."""
        return self.trained / max(self.blocked + self.trained, 1e-9)


class SyncClock:
    """Measures how long training is blocked, from one committed sync to the next.

    Args:
        hang_watch: Gives blocked training, which waits for other groups, the time for that.
        wait_limit_s: The longest that it may take until a quorum has formed, and from there until
            the vote is over, in seconds. What takes longer is a hang and no wait.
    """

    def __init__(self, hang_watch: HangWatch, wait_limit_s: float) -> None:
        self._hang_watch = hang_watch
        self._wait_limit_s = wait_limit_s
        self._began = self._waiting_since = time.monotonic()
        self._blocked_since: float | None = None
        self._blocked_s = self._waited_s = 0.0

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """A context whose time counts as blocked. It begins with the wait for a quorum."""
        self._blocked_since = self._waiting_since = time.monotonic()
        try:
            with self._hang_watch.waiting_for_others(self._wait_limit_s):
                yield
        finally:
            self._blocked_s += time.monotonic() - self._blocked_since
            self._blocked_since = None

    def quorum_formed(self) -> None:
        """Record that the wait for a quorum is over."""
        self._waited_s += time.monotonic() - self._waiting_since
        self._hang_watch.note_progress()

    def vote_over(self) -> None:
        """Record that the vote is over: a retry begins with a wait for another quorum."""
        self._waiting_since = time.monotonic()
        self._hang_watch.note_progress()

    def read(self) -> SyncSeconds:
        """Return where the time since the last call went, and start anew."""
        now = time.monotonic()
        blocked_s = self._blocked_s
        if self._blocked_since is not None:  # the sync that is accounted for has not ended yet
            blocked_s += now - self._blocked_since
            self._blocked_since = now
        trained_s = max(0.0, now - self._began - blocked_s)
        reading = SyncSeconds(blocked_s, self._waited_s, trained_s)
        self._began, self._blocked_s, self._waited_s = now, 0.0, 0.0
        return reading
