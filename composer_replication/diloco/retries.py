"""The attempts of one sync, until it commits or this group gives up."""

from __future__ import annotations

import logging
import time

from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.torchft_api import DiLoCoManager, fault_of_last_sync

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Back-off between the attempts of a sync, in seconds."""

POLL_S, LOG_EVERY_S = 1.0, 30.0
"""While too few groups are connected."""

MAX_FAILED_JOINS = 2
"""How many attempts to join may fail because of this group before it leaves. There are few, since
each failure also costs the groups in training an attempt of their sync."""


class SyncError(RuntimeError):
    """A sync did not commit, and its retries are used up."""


class SyncRetries:
    """Waits after each attempt that did not commit, and counts those that nobody else caused.

    Local and global parameters do not change before the vote, so a retry computes the same
    pseudo-gradient again. (torchft resets the model and drops the round.)

    A failed attempt counts against ``max_retries`` if no group is known to have caused it. (A group
    in training that causes failures leaves after a while, see ``QuorumWatch``.) One that failed
    only because fewer than ``min_replica_size`` groups were connected does not count either: this
    group waits for the others to return.

    Args:
        manager: The torchft manager, or its simulated double.
        state: The global state.
        max_retries: How many attempts that count may fail in a row.
        give_up_after_s: How long to wait for enough groups, in seconds. None: without a limit.

    Attributes:
        count: Attempts that did not commit although enough groups were connected.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        state: GlobalState,
        max_retries: int,
        give_up_after_s: float | None,
    ) -> None:
        self._manager = manager
        self._state = state
        self._max_retries = max_retries
        self._give_up_after_s = give_up_after_s
        self.count = self._num_unexplained = 0
        self._cause = ""
        self._had_too_few = False
        self._began = time.monotonic()
        self._log_after_s = 0.0

    def wait(self) -> None:
        """Wait before the next attempt, after one that did not commit.

        Raises:
            SyncError: Too few groups have been connected for longer than ``give_up_after_s``.
        """
        present, needed = self._manager.num_participants(), self._manager._min_replica_size
        self._cause = why_not_committed(self._manager)
        self._had_too_few = self._manager.errored() is None and present < needed
        if self._had_too_few:
            self._wait_for_groups(present, needed)
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.count)
        self.count += 1
        log.warning(
            "The sync after outer step %d did not commit, attempt %d: %s. Nothing is lost; "
            "trying again in %.1f s",
            self._state.outer_step,
            self.count,
            self._cause,
            pause_s,
        )
        time.sleep(pause_s)

    def _wait_for_groups(self, present: int, needed: int) -> None:
        waited = time.monotonic() - self._began
        situation = f"{present} replica groups are connected, and min_replica_size={needed}"
        if self._give_up_after_s is not None and waited > self._give_up_after_s:
            raise SyncError(
                f"{situation}, for {waited:.0f} s, above give_up_after_s={self._give_up_after_s:g}."
                " Start the missing groups again, or lower min_replica_size"
            )
        if waited >= self._log_after_s:
            self._log_after_s = waited + LOG_EVERY_S
            log.warning("Waiting to sync for %.0f s: %s", waited, situation)
        time.sleep(POLL_S)

    def check_limit(self, is_joining: bool) -> None:
        """Give up after too many failed attempts.

        Called in the next attempt's quorum, since only that says which group caused the failure.

        A joiner gives up before the groups in training. Of these, one gives up at a time, the last
        of the quorum first: the others may then succeed without it.

        Args:
            is_joining: Whether this group is a joiner. Failures that it has caused count.

        Raises:
            SyncError: More attempts have failed than this group may make.
        """
        fault = fault_of_last_sync(self._manager)
        if fault == "another" or (fault == "this" and not is_joining):
            self._num_unexplained = 0
            return
        if self._had_too_few:
            return
        self._num_unexplained += 1
        if is_joining:
            limit = MAX_FAILED_JOINS - 1
        else:
            rank = self._manager.participating_rank() or 0
            limit = self._max_retries + self._manager.num_participants() - 1 - rank
        if self._num_unexplained > limit:
            error = SyncError(
                f"the sync after outer step {self._state.outer_step} did not commit in "
                f"{self._num_unexplained} attempts, the last one because {self._cause}. Local "
                "parameters are kept. Check that the other replica groups and the lighthouse are "
                f"alive, or raise max_sync_retries={self._max_retries}"
            )
            self._manager.report_error(error)  # the other groups are in a quorum with this one
            raise error


def why_not_committed(manager: DiLoCoManager) -> str:
    """Why the last commit vote failed, as far as this group knows."""
    error = manager.errored()
    if error is not None:
        original = getattr(error, "original_exception", error)
        return f"{type(original).__name__}: {original}".splitlines()[0]
    return (
        f"{manager.num_participants()} replica groups in the quorum are too few, or another rank "
        "of this group reported an error"
    )
