"""The report of a committed sync, and the clock that measures its seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class SyncReport:
    """What one committed sync did, as seen by this group.

    Attributes:
        outer_step: Outer steps committed so far, this one included.
        fragment: Which fragment it was, from 0.
        num_participants: Groups in the quorum.
        contribution: This group's weight in the mean; 0 if it had not trained.
        total_contribution: The sum of all weights; 0 means that nothing moved.
        inner_steps: Inner steps of this group since the run began.
        sync_seconds: How long training was blocked by it, in seconds.
        wait_seconds: The part of ``sync_seconds`` spent waiting for the quorum.
        compute_fraction: The fraction of the time since the previous sync spent training.
        bytes_sent: Size of this rank's messages in the wire format. Each of k groups sends
            2 (k - 1) / k times this size to the others: with two groups, this size once.
        bytes_float32: The size that the messages would have in float32.
        pseudo_gradient_norm: L2 norm of this group's own pseudo-gradient.
        outer_momentum_norm: L2 norm of the fragment's momentum after the outer step.
        steps_lost: Inner steps that this group has thrown away since the previous sync, because it
            took the global state from a peer or its pseudo-gradient was not finite. 0 for a joiner.
        retries: Attempts that did not commit before this one did.
        healed: Whether this group took the global state from a peer in this sync.
        outer_lr: Learning rate of the outer optimizer in this sync.
        settings_version: Version of the settings in force in this sync; 0 without a coordinator.
        global_digest: SHA-256 of the global parameters after this sync, every ``digest_every``
            outer steps; None in between.
    """

    outer_step: int
    fragment: int
    num_participants: int
    contribution: float
    total_contribution: float
    inner_steps: int
    sync_seconds: float
    wait_seconds: float
    compute_fraction: float
    bytes_sent: int
    bytes_float32: int
    pseudo_gradient_norm: float
    outer_momentum_norm: float
    steps_lost: int
    retries: int
    healed: bool
    outer_lr: float
    settings_version: int
    global_digest: str | None


class SyncClock:
    """Measures how long training is blocked, from one committed sync to the next."""

    def __init__(self) -> None:
        self._began = self._waiting_since = time.monotonic()
        self._blocked_since: float | None = None
        self._blocked_s = self._waited_s = 0.0

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """A context whose time counts as blocked. It begins with the wait for a quorum."""
        self._blocked_since = self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._blocked_s += time.monotonic() - self._blocked_since
            self._blocked_since = None

    def quorum_formed(self) -> None:
        """Record that the wait for a quorum is over."""
        self._waited_s += time.monotonic() - self._waiting_since

    def vote_over(self) -> None:
        """Record that the vote is over: a retry begins with a wait for another quorum."""
        self._waiting_since = time.monotonic()

    def read(self) -> tuple[float, float, float]:
        """Return seconds blocked, seconds waited and the fraction spent training; reset all."""
        now = time.monotonic()
        elapsed = max(now - self._began, 1e-9)
        blocked_s = self._blocked_s
        if self._blocked_since is not None:  # the sync that is accounted for has not ended yet
            blocked_s += now - self._blocked_since
            self._blocked_since = now
        reading = blocked_s, self._waited_s, max(0.0, 1.0 - blocked_s / elapsed)
        self._began, self._blocked_s, self._waited_s = now, 0.0, 0.0
        return reading
