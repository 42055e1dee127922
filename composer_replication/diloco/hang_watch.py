"""Ends a process whose training hangs, and the clock that measures what a sync costs training."""

from __future__ import annotations

import faulthandler
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from composer_replication.util.fence import fence

log = logging.getLogger(__name__)

HANG_TIMEOUT_S = 1800.0
"""How long a group may make no progress before it ends, in seconds."""


class HangWatch:
    """Ends the process when training has made no progress for too long.

    torchft sends heartbeats from a thread of its own. A group whose training thread hangs (a dead
    file server, a deadlocked loader, a hung GPU) therefore looks alive, and the lighthouse lets the
    other groups wait for it: one hung group of two stops the whole run.

    Each call of ``note_progress`` is progress. Without progress, a process counts as hung after
    ``timeout_s`` if it was idle, and after ``BUSY_FACTOR`` times ``timeout_s`` if it was busy: a
    long backward pass, evaluation batch or save uses the processor or the disk, and a thread that
    waits uses neither. While it waits for others it has the time limit of the wait in addition.

    Args:
        timeout_s: How long a process may be without progress, in seconds; ``math.inf``: for any
            time.
    """

    BUSY_FACTOR = 5
    BUSY_CPU = 0.2
    """Processor seconds per second above which a process is busy. Heartbeats and waiting threads
    use less."""
    BUSY_BLOCKS_PER_S = 200
    """Blocks of 512 bytes a second to and from storage above which a process is busy. Logs cause
    fewer."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._progress_at = time.monotonic()
        self._wait_limit_s = 0.0
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread that watches: training begins."""
        self.note_progress()
        self._ended = threading.Event()
        arguments = (self._ended,)
        threading.Thread(target=self._run, args=arguments, name="hang_watch", daemon=True).start()

    def note_progress(self) -> None:
        """Record that something was completed, such as an evaluation batch or a save.

        It is cheap enough for every event of a training loop.
        """
        self._progress_at = time.monotonic()

    @contextmanager
    def waiting_for_others(self, limit_s: float) -> Iterator[None]:
        """A context in which this process may be idle for longer, since it waits for others.

        Args:
            limit_s: After how long the wait itself gives up, or calls ``note_progress``, in
                seconds. ``math.inf``: in this context nothing counts as a hang.
        """
        outer_limit_s = self._wait_limit_s
        self._wait_limit_s = max(outer_limit_s, limit_s)
        self.note_progress()
        try:
            yield
        finally:
            self._wait_limit_s = outer_limit_s
            self.note_progress()

    def stop(self) -> None:
        """End the thread: training is over."""
        self._ended.set()

    def _run(self, ended: threading.Event) -> None:
        pause_s = min(1.0, self.timeout_s / 20)
        cpu_before, blocks_before = self._used()
        looked_at = time.monotonic()
        alive_at = looked_at
        while not ended.wait(pause_s):
            now = time.monotonic()
            passed = now - looked_at
            looked_at = now
            if passed > 10 * pause_s:  # the process was stopped, for example by Ctrl-Z
                self._progress_at += passed
                alive_at += passed
            cpu_s, blocks = self._used()
            uses_cpu = cpu_s - cpu_before > self.BUSY_CPU * passed
            uses_disk = blocks - blocks_before > self.BUSY_BLOCKS_PER_S * passed
            cpu_before = cpu_s
            blocks_before = blocks
            if uses_cpu or uses_disk:
                alive_at = now
            alive_at = max(alive_at, self._progress_at)
            idle_s = now - alive_at
            without_progress_s = now - self._progress_at
            if idle_s > self.timeout_s + self._wait_limit_s:
                self._end(f"nothing for {idle_s:.0f} s")
            elif without_progress_s > self.BUSY_FACTOR * self.timeout_s + self._wait_limit_s:
                self._end(f"no step, sync, save or evaluation for {without_progress_s:.0f} s")

    def _used(self) -> tuple[float, int]:
        """Processor seconds and blocks of storage traffic that this process has used so far."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_oublock

    def _end(self, why: str) -> None:
        waits = f" and the {self._wait_limit_s:g} s of its wait" if self._wait_limit_s else ""
        end_process(
            1,
            f"This replica group hangs: it has completed {why}, above hang_timeout_s="
            f"{self.timeout_s:g}{waits}. It ends, so that the others can continue; the stacks of "
            "its threads follow on stderr. Raise hang_timeout_s if the group was only slow",
        )


def end_process(status: int, why: str) -> NoReturn:
    """End this process at once, with an error in the log and the stacks of its threads."""
    with fence("why this group ends"):
        log.error("%s", why)
    with fence("the stacks"):
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(status)


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


class SyncClock:
    """Measures how long training is blocked, from one committed sync to the next.

    Args:
        hang_watch: Gives blocked training, which waits for other groups, the time for that.
        wait_limit_s: The longest that one request for a quorum may take, and from the quorum until
            the vote is over, in seconds. What takes longer is a hang and no wait.
    """

    def __init__(self, hang_watch: HangWatch, wait_limit_s: float) -> None:
        self._hang_watch = hang_watch
        self._wait_limit_s = wait_limit_s
        self._began = time.monotonic()
        self._waiting_since = self._began
        self._blocked_since = self._began
        self._blocked_s = 0.0
        self._waited_s = 0.0

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """A context whose time counts as blocked. It begins with the wait for a quorum."""
        self._blocked_since = time.monotonic()
        self._waiting_since = self._blocked_since
        try:
            with self._hang_watch.waiting_for_others(self._wait_limit_s):
                yield
        finally:
            self._blocked_s += time.monotonic() - self._blocked_since

    def quorum_formed(self) -> None:
        """Record that the wait for a quorum is over."""
        self._waited_s += time.monotonic() - self._waiting_since
        self._hang_watch.note_progress()

    def vote_over(self) -> None:
        """Record that the vote is over: a retry begins with a wait for another quorum."""
        self._waiting_since = time.monotonic()
        self._hang_watch.note_progress()

    def read(self) -> SyncSeconds:
        """Return where the time since the last call went, and start again from now.

        Called while training is blocked: the sync that is accounted for has not ended yet.
        """
        now = time.monotonic()
        blocked_s = self._blocked_s + now - self._blocked_since
        trained_s = max(0.0, now - self._began - blocked_s)
        reading = SyncSeconds(blocked_s, self._waited_s, trained_s)
        self._began = now
        self._blocked_since = now
        self._blocked_s = 0.0
        self._waited_s = 0.0
        return reading
