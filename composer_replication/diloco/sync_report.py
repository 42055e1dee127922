"""What a committed sync reports, and the clock behind its seconds."""

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
        sync_seconds: How long training stood still for it.
        wait_seconds: The part of that spent waiting for the quorum.
        compute_fraction: Of the time since the sync before, the part spent training.
        bytes_sent: Size of this rank's messages, as they travel. Of k groups each sends 2 (k - 1) /
            k of it to the others: with two, all of it.
        bytes_float32: The size that they would have in float32.
        pseudo_gradient_norm: L2 norm of this group's own pseudo-gradient.
        outer_momentum_norm: L2 norm of the fragment's momentum after the outer step.
        steps_lost: Inner steps that this group has thrown away since the sync before, because it
            took the global state from a peer or was not finite. 0 for a joiner.
        retries: Attempts that did not commit before this one did.
        healed: Whether this group took the global state from a peer in it.
        outer_lr: Learning rate of the outer optimizer in it.
        settings_version: Of the settings in force in it; 0 without a coordinator.
        global_digest: SHA-256 of the global parameters after it, as often as asked for.
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
    """Measures how long training stands still, from one committed sync to the next."""

    def __init__(self) -> None:
        self._began = self._waiting_since = time.monotonic()
        self._blocked_since: float | None = None
        self._blocked_s = self._waited_s = 0.0

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the time inside as not training; at first it waits for a quorum."""
        self._blocked_since = self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._blocked_s += time.monotonic() - self._blocked_since
            self._blocked_since = None

    def quorum_formed(self) -> None:
        """The wait for a quorum is over."""
        self._waited_s += time.monotonic() - self._waiting_since

    def vote_over(self) -> None:
        """What comes next, if the sync is tried again, is the wait for another quorum."""
        self._waiting_since = time.monotonic()

    def read(self) -> tuple[float, float, float]:
        """Seconds blocked, seconds waited, fraction of the time training; and start again."""
        now = time.monotonic()
        elapsed = max(now - self._began, 1e-9)
        blocked_s = self._blocked_s
        if self._blocked_since is not None:  # the sync being accounted for is what blocks
            blocked_s += now - self._blocked_since
            self._blocked_since = now
        reading = blocked_s, self._waited_s, max(0.0, 1.0 - blocked_s / elapsed)
        self._began, self._blocked_s, self._waited_s = now, 0.0, 0.0
        return reading
