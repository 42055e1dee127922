"""When a start or a sync is tried again, with which pause, and when to give up.

``outer_loop.py`` makes the attempts, and ``replica/blame.py`` says who has made one fail.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.options import ReplicaOptions

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
"""The back-off after the first failed attempt of a sync, in seconds. It doubles with each."""

LONGEST_PAUSE_S = 5.0

POLL_S = 1.0
"""Seconds between two looks while groups are missing, or two requests for a quorum."""

START_POLL_S = 0.5
"""Seconds between two attempts to start."""

LOG_EVERY_S = 30.0
"""Seconds between two log lines while groups are missing."""

MAX_FAILED_JOINS = 2
"""After how many attempts to join in a row that no other group has made fail this group leaves.
Each also costs the groups in training an attempt of their sync, so the number is small."""


class SyncError(RuntimeError):
    """A sync did not commit, and its retries are used up.

    It is also raised if there was no quorum, or one with too few groups, for longer than
    ``give_up_after_s``; and if this group's pseudo-gradient was not sound in more than
    ``max_sync_retries`` syncs in a row. The local parameters are kept, except in the last case.
    """


class NothingToContinueFromError(ValueError):
    """All groups of a run are connected, it has made outer steps, and no group has its state.

    The message says which checkpoint to load, or how to begin another run.
    """


class StartPostponed(Exception):
    """Fails the commit vote of a start that waits for more groups. It is never raised."""


class Waiting:
    """The clock of a wait for other groups: when to log what is missing, and when to give up.

    Args:
        purpose: What the wait is for, for its messages.
        limit_s: How long to wait, in seconds. None: without a limit.
        log_after_s: When to log for the first time, in seconds.

    Attributes:
        began: When the wait began, by ``time.monotonic``.
    """

    def __init__(self, purpose: str, limit_s: float | None, log_after_s: float = 0.0) -> None:
        self._purpose = purpose
        self._limit_s = limit_s
        self._log_after_s = log_after_s
        self.began = time.monotonic()

    @property
    def waited_s(self) -> float:
        """How long the wait has taken so far, in seconds."""
        return time.monotonic() - self.began

    @property
    def is_late(self) -> bool:
        """Whether the wait has taken longer than its limit."""
        return self._limit_s is not None and self.waited_s > self._limit_s

    def go_on(self, situation: Callable[[], str], fix: str) -> None:
        """Continue the wait, unless it has taken longer than its limit.

        Args:
            situation: Returns what is missing. It is called for a log line or an error only.
            fix: What to do about it, for the error.

        Raises:
            SyncError: The wait has taken longer than its limit.
        """
        if self.is_late:
            raise SyncError(
                f"waited {self._purpose} for {self.waited_s:.0f} s, above give_up_after_s="
                f"{self._limit_s:g}: {situation()}. {fix}"
            )
        self.log(situation)

    def log(self, situation: Callable[[], str]) -> None:
        """Log every ``LOG_EVERY_S`` what is missing."""
        waited_s = self.waited_s
        if waited_s >= self._log_after_s:
            self._log_after_s = waited_s + LOG_EVERY_S
            log.warning("Waiting %s for %.0f s: %s", self._purpose, waited_s, situation())


class SyncRetries:
    """Waits after each failed attempt, and counts those that nobody is known to have caused.

    Global parameters do not change before the vote, so a retry sends again what the attempt has
    sent, with the inner steps taken since. (torchft resets the model and drops the round.)

    A failed attempt counts against ``max_sync_retries`` if no group is known to have caused it
    (``Blame.fault``; with a stock torchft Manager none ever is). After one that is known the count
    begins again: a group in training that causes failures leaves by ``Blame``, after a while. A
    joiner's own failures count too, up to ``MAX_FAILED_JOINS``. Two kinds do not count: if nothing
    but the number of groups, below ``min_replica_size``, kept a sync from committing, this group
    waits for the others to return; and the attempt after a first doubt finds whom to leave out.

    Args:
        manager: The torchft manager, or its simulated double.
        state: The global state.
        give_up_after_s: How long to wait for enough groups, in seconds. None: without a limit.

    Attributes:
        count: Attempts that did not commit although enough groups were connected. Each doubles the
            pause.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        state: GlobalState,
        give_up_after_s: float | None,
    ) -> None:
        self._manager = manager
        self._state = state
        self._waiting = Waiting("to sync", give_up_after_s)
        self.count = 0
        self._num_unexplained = 0

    def form_quorum(self, is_joining: bool, has_doubts: bool) -> None:
        """Wait after an attempt that did not commit, and form the quorum of the next one.

        Args:
            is_joining: Whether this group is a joiner. Failures that it has caused count.
            has_doubts: Whether a rank of this group takes what has arrived for unsound. The next
                attempts then gather the messages, and the first of them is made in any case: it
                finds whom to leave out.

        Raises:
            SyncError: More attempts have failed than this group may make, or in all attempts of
                more than ``give_up_after_s`` too few groups were connected.
        """
        manager = self._manager
        is_first_doubt = has_doubts and not manager.asks_to_gather
        manager.asks_to_gather |= has_doubts  # until the sync has committed
        cause = why_not_committed(manager)
        present = manager.num_participants()
        needed = manager._min_replica_size
        has_too_few = manager.errored() is None and present < needed
        if has_too_few:
            situation = f"{present} replica groups are connected, and min_replica_size={needed}"
            self._waiting.go_on(
                lambda: situation, "Start the missing groups again, or lower min_replica_size"
            )
            time.sleep(POLL_S)
        else:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.count, 10))
            self.count += 1
            log.warning(
                "The sync after outer step %d did not commit, attempt %d: %s. Nothing is lost; "
                "trying again in %.1f s",
                self._state.outer_step,
                self.count,
                cause,
                pause_s,
            )
            time.sleep(pause_s)
            self._waiting.began = time.monotonic()  # so far there were enough
        manager.start_quorum()  # only this says which group has caused the failure
        if is_first_doubt:
            return
        if manager.fault == "another" or (manager.fault == "this" and not is_joining):
            self._num_unexplained = 0
        elif not has_too_few:
            self._num_unexplained += 1
            self._check_limit(is_joining, cause)

    def _check_limit(self, is_joining: bool, cause: str) -> None:
        """Give up after too many failed attempts.

        A joiner gives up before the groups in training. Of these, one gives up at a time, the last
        one of the quorum first: the others may succeed without it.
        """
        max_retries = self._state.settings.max_sync_retries
        if is_joining:
            limit = MAX_FAILED_JOINS - 1
            fix = "start this group again"
        else:
            rank = self._manager.participating_rank() or 0
            limit = max_retries + self._manager.num_participants() - 1 - rank
            fix = f"raise max_sync_retries={max_retries}"
        if self._num_unexplained > limit:
            error = SyncError(
                f"the sync after outer step {self._state.outer_step} did not commit in "
                f"{self._num_unexplained} attempts, the last one because {cause}. Local "
                "parameters are kept. Check that the other replica groups and the lighthouse are "
                f"alive, or {fix}"
            )
            # The others are in a quorum with this group, and must not wait for it.
            self._manager.report_error(error)
            raise error


class StartBarrier:
    """Holds a start until enough groups are connected.

    Without it the first group would train alone, and so would the next one, without an error.

    Args:
        manager: The torchft manager, or its simulated double.
        options: This group's options: how many groups to wait for, for how long, and what to do
            after that.
        start_refusal: Why this group must not begin the run. None: it may.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        options: ReplicaOptions,
        start_refusal: str | None,
    ) -> None:
        self._manager = manager
        self._options = options
        self._start_refusal = start_refusal
        self._waiting = Waiting("for replica groups", options.start_timeout_s, log_after_s=2.0)
        self._failures = 0

    def vote_to_start(self, device: torch.device) -> bool:
        """Vote on the start with the other groups of this quorum.

        With fewer groups than ``min_replica_size`` no group votes yes: a start sends all
        parameters, and could not commit. The groups start if one votes yes and none has a veto. All
        see the same sum of the votes, so they start together or not at all, however long each has
        been waiting.

        Args:
            device: Where the votes are summed.

        Returns:
            Whether the groups start. If not, an error has been reported to the manager, and the
            commit vote that the caller still has to take fails.

        Raises:
            NothingToContinueFromError: This group must not start, and every group that could hold
                the run's state is connected.
        """
        manager = self._manager
        options = self._options
        num_present = manager.num_participants()
        is_enough = num_present >= options.num_awaited
        starts_late = options.on_start_timeout == "start" and self._waiting.is_late
        can_commit = num_present >= manager._min_replica_size
        vetoes = self._start_refusal is not None and manager.current_step() == 0
        is_yes = can_commit and (is_enough or starts_late)
        votes = torch.tensor([float(is_yes), float(vetoes)], device=device)
        manager.allreduce(votes, reduce_op=ReduceOp.SUM).wait()  # pyright: ignore
        if manager.errored() is not None:
            return False
        situation = f"{num_present} of {options.num_awaited} replica groups are connected"
        if not can_commit:
            situation += f", and min_replica_size={manager._min_replica_size}"
        num_yes, num_vetoes = votes.tolist()
        if vetoes:
            situation += f", and none of them has the run's state. {self._start_refusal}"
            if is_enough:
                raise NothingToContinueFromError(situation)
        if num_vetoes or not num_yes:
            manager.report_error(StartPostponed(situation))
            return False
        if not is_enough:
            log.warning("Starting although %s", situation)
        return True

    def form_quorum(self) -> None:
        """Wait ``START_POLL_S`` seconds after a start that did not commit, and form a quorum.

        Raises:
            TimeoutError: ``start_timeout_s`` has passed, and too few groups are connected to start
                with; or the start has failed ``MAX_FAILED_JOINS`` times in a row, and another group
                is not known to have caused it.
        """
        manager = self._manager
        error = _original(manager.errored())
        situation = str(error)
        is_failure = not isinstance(error, StartPostponed)
        if is_failure:  # for example because a group has left again
            cause = why_not_committed(manager)
            situation = f"the start did not commit: {cause}"
            log.warning("The start did not commit: %s", cause)
        options = self._options
        may_start = options.on_start_timeout == "start" and self._start_refusal is None
        can_commit = manager.num_participants() >= manager._min_replica_size
        if self._waiting.is_late and not (may_start and can_commit):
            raise TimeoutError(
                f"no start within start_timeout_s={options.start_timeout_s:g}: {situation}. "
                "Start the missing groups with the same lighthouse, or lower num_replicas"
            )
        self._waiting.log(lambda: situation)
        time.sleep(START_POLL_S)
        manager.start_quorum()  # only this says which group has caused the failure
        if not is_failure or manager.fault == "another":
            self._failures = 0
            return
        self._failures += 1
        if self._failures == MAX_FAILED_JOINS:
            whose = "because of this group" if manager.fault else "and nobody is known to cause it"
            raise TimeoutError(
                f"the start has failed {self._failures} times in a row {whose}: this group leaves. "
                f"The last time {situation}"
            )


def why_not_committed(manager: DiLoCoManager) -> str:
    """Why the last commit vote failed, as far as this group knows."""
    error = _original(manager.errored())
    if error is not None:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return (
        f"{manager.num_participants()} replica groups in the quorum are too few, or another rank "
        "of this group reported an error"
    )


def _original(error: Any) -> Any:
    """The error that torchft's manager has wrapped; None if there is none."""
    return getattr(error, "original_exception", error)
