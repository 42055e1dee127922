"""Keeps replica groups running: a group that dies is started again, and what happened is said."""

from __future__ import annotations

import logging
import math
import re
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.diloco.fence import fence
from composer_replication.group.run_folder import (
    EVENTS,
    REJECTED,
    START,
    STATUS,
    SYNC,
    last_event,
    log_path,
)
from composer_replication.group.words import plural
from composer_replication.launch.output import BAD_INPUT
from composer_replication.launch.processes import POLL_S, ReplicaGroups, ReplicaId
from composer_replication.replica.json_files import read_json, replace_json

log = logging.getLogger(__name__)

SUPERVISED_HANG_TIMEOUT_S = 600.0
"""Seconds without any progress after which a group ends itself, where it is started again.

Where nobody does, DiLoCo's own limit is longer.
"""

MAX_RESTARTS = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

IN_THE_PROGRAM = re.compile(
    "(Type|Name|UnboundLocal|Attribute|Import|ModuleNotFound|Syntax|Indentation|MissingExtra)Error:"
)
"""How errors begin that a program would have again at its next start, whatever happens around it.
"""

RESTARTING, LEFT_OUT, NOT_BACK = "restarting", "left out", "not back"
"""Phases of a group that has died: it will be started again; it failed too often, and the others go
on; it died when no group was left to join."""

JOINED = ("training", "evaluating", "finished")
"""Phases of a group that has joined the others."""


@dataclass
class GroupRecord:
    """What has happened to a group.

    Attributes:
        restarts: How often it was started again.
        in_a_row: Restarts since its last committed sync.
        committed: When its newest sync before its last start was over.
        due: When it is started again, by ``time.monotonic``; None while it runs or has ended for
            good.
        status: The exit status with which it ended for good; None before.
        end: ``LEFT_OUT`` or ``NOT_BACK`` if it ended for good while the run went on.
        failed_starts: How often it had an error of its own before it joined.
        error: The last of these errors, in the line that its log has; empty without one.
        deaths: The exit statuses of all its early ends.
    """

    restarts: int = 0
    in_a_row: int = 0
    committed: float = 0.0
    due: float | None = None
    status: int | None = None
    end: str = ""
    failed_starts: int = 0
    error: str = ""
    deaths: list[int] = field(default_factory=list)


@dataclass
class Supervisor:
    """Watches the groups until all have ended, one has failed for good, or the run is interrupted.

    A group that dies is started again after 1, 2, 4, ... s. It fails for good in three cases: its
    exit status says bad input, or its callback does and the group has never joined the others; it
    had an error of its own before it ever joined (an import, a setting), with which its next start
    would fail too: such an error is in the program, or all groups had the same; or it died after
    ``max_restarts`` restarts in a row without a sync of its own. If it was never restarted, that
    ends the run. Otherwise the group is left out, as long as others train. When all others have
    finished there is nothing to join, and the group is given up.

    Args:
        groups: The processes.
        run_dir: The run's folder.
        start: Starts a group, by its id.
        ids: The groups.
        max_restarts: Most restarts in a row; 0 for none.
        start_retries: How often a group that had an error of its own before it joined is started
            again nevertheless, because the reason may be outside of it.
        first_pause_s: Seconds before the first restart; each in a row waits twice as long.
        start_timeout_s: Seconds that the groups have to join.
        advice: What is probably wrong with one that does not. Empty: nobody knows.
    """

    groups: ReplicaGroups
    run_dir: Path
    start: Callable[[Any], None]
    ids: Collection[ReplicaId]
    max_restarts: int
    start_retries: int = 0
    first_pause_s: float = field(default_factory=lambda: FIRST_PAUSE_S)
    start_timeout_s: float = math.inf
    advice: str = ""
    records: dict[Any, GroupRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.records = {replica_id: GroupRecord() for replica_id in self.ids}
        self._ends: list[str] = []
        self._join_by = time.monotonic() + self.start_timeout_s

    def watch(self, show: Callable[[dict[Any, int | None], bool], None]) -> dict[Any, int]:
        """Watch the groups until the end.

        Args:
            show: Called all the time with the exit statuses, and whether this is the last call.

        Returns:
            The exit statuses of the groups that failed for good; empty if none did.
        """
        while True:
            self._poll()
            statuses = {replica_id: record.status for replica_id, record in self.records.items()}
            failed = {
                id: status for id, status in statuses.items() if status and not self.records[id].end
            }
            is_last = bool(failed or None not in statuses.values() or self.groups.interrupts.count)
            show(statuses, is_last)
            if is_last:
                return failed
            time.sleep(POLL_S)

    def begin(self, replica_id: ReplicaId) -> None:
        """Forget what an earlier process of a group has said about itself."""
        self._write_phase(replica_id, "starting")

    def new_ends(self) -> list[str]:
        """Say of each early end of a group since the last call how it ended, and what follows."""
        lines, self._ends = self._ends, []
        return lines

    @fence("which groups have not joined")
    def late_start(self) -> str | None:
        """Say once, after ``start_timeout_s``, which groups have not joined, and the advice."""
        if not self.advice or time.monotonic() < self._join_by:
            return None
        self._join_by = math.inf
        missing = ", ".join(str(id) for id in self.ids if not has_joined(self.run_dir, id))
        after = f"after {plural(round(self.start_timeout_s), 'second')}"
        return f"Replica group {missing} has not joined {after}. {self.advice}" if missing else None

    @property
    def restarts(self) -> dict[str, int]:
        """How often each group was started again, by its id."""
        return {str(replica_id): record.restarts for replica_id, record in self.records.items()}

    def is_training(self, replica_id: ReplicaId) -> bool:
        """Whether a group is training now."""
        record = self.records[replica_id]
        is_running = record.status is None and record.due is None
        return is_running and self._phase(replica_id) == "training"

    def _poll(self) -> None:
        for replica_id, status in self.groups.exit_statuses().items():
            record = self.records[replica_id]
            if record.status is not None:
                continue
            if record.due is not None:
                self._start_again_if_due(replica_id, record)
            elif status == 0:
                self.groups.end(replica_id)
                record.status = 0
            elif status is not None:
                self._handle_death(replica_id, record, status)
            elif self._is_rejoining(replica_id, record) and self._has_nobody_to_join(replica_id):
                self._give_up(replica_id, record)

    def _handle_death(self, replica_id: ReplicaId, record: GroupRecord, status: int) -> None:
        record.deaths.append(status)
        end = f"group {replica_id} {describe_end(status)}"
        was_rejected = self._phase(replica_id) == REJECTED
        if was_rejected:
            status = BAD_INPUT  # a script of the user's own ends with any status
        self.groups.end(replica_id)  # kills ranks and loader workers that outlived their parent
        if self._last_commit(replica_id) > record.committed:
            record.in_a_row = 0
        if self._has_nobody_to_join(replica_id):
            self._give_up(replica_id, record)
            self._ends.append(f"{end}; it is too late to join the others again")
            return
        # What was accepted once may be rejected for a reason that passes, such as a host name that
        # does not resolve while the machine starts.
        may_pass = was_rejected and bool(self._last_event(replica_id, START, SYNC))
        has_failed = status == BAD_INPUT or self._has_failed_to_start(replica_id, status)
        is_hopeless = has_failed and not may_pass
        if is_hopeless and self._phase(replica_id) not in JOINED:
            record.error = self.groups.last_error(replica_id)
            if self._would_fail_again(record):
                status = BAD_INPUT
        if is_hopeless or record.in_a_row >= self.max_restarts:
            record.status = status
            then = ", and is not started again"
            if record.restarts > 0 and any(map(self.is_training, self.records)):
                record.end = LEFT_OUT
                self._write_phase(replica_id, LEFT_OUT)
                then = "; the others go on without it"
            self._ends.append(end + then)
            return
        pause_s = min(LONGEST_PAUSE_S, self.first_pause_s * 2**record.in_a_row)
        record.due = time.monotonic() + pause_s
        self._write_phase(replica_id, RESTARTING, restart_at=time.time() + pause_s)
        restart = f"restart {record.in_a_row + 1} of {self.max_restarts}"
        self._ends.append(f"{end}, starts again in {pause_s:.0f} s ({restart})")

    def _has_failed_to_start(self, replica_id: ReplicaId, status: int) -> bool:
        """Whether a group ended with an error of its own before it joined, in its first process.

        A signal is no such error. Nor is the end of a group after another one has died: while a
        group waits for the start, its error may be that the other is missing.
        """
        own = self.records[replica_id]
        is_signal = status < 0 or status >= 128  # Composer's launcher exits with -9 as 247
        has_died = any(
            len(record.deaths) - (record is own) > record.failed_starts
            for record in self.records.values()
        )
        if is_signal or has_died or self._phase(replica_id) in JOINED:
            return False
        own.failed_starts += 1
        own.error = self.groups.last_error(replica_id)
        return own.failed_starts > self.start_retries or self._would_fail_again(own)

    def _would_fail_again(self, own: GroupRecord) -> bool:
        """Whether a group's error before it joined is in the program, or all groups had it."""
        errors = [record.error for record in self.records.values()]
        is_in_all = len(errors) > 1 and len(set(errors)) == 1
        return bool(own.error and (is_in_all or IN_THE_PROGRAM.match(own.error)))

    def _start_again_if_due(self, replica_id: ReplicaId, record: GroupRecord) -> None:
        if time.monotonic() < (record.due or 0.0):
            return
        record.due = None
        record.restarts += 1
        record.in_a_row += 1
        record.committed = self._last_commit(replica_id)
        self.start(replica_id)

    def _has_nobody_to_join(self, replica_id: ReplicaId) -> bool:
        """Whether some groups have finished, and none is training that this group could join."""
        others = {id: record for id, record in self.records.items() if id != replica_id}
        has_ended = any(record.status == 0 for record in others.values())
        return has_ended and all(
            record.status is not None or record.due is not None or self._is_rejoining(id, record)
            for id, record in others.items()
        )

    def _is_rejoining(self, replica_id: ReplicaId, record: GroupRecord) -> bool:
        """Whether a group was started again and has not joined yet."""
        return bool(record.restarts) and self._phase(replica_id) in (RESTARTING, "joining")

    def _give_up(self, replica_id: ReplicaId, record: GroupRecord) -> None:
        self.groups.end(replica_id)
        record.end, record.due, record.status = NOT_BACK, None, 1
        self._write_phase(replica_id, NOT_BACK)

    def _last_commit(self, replica_id: ReplicaId) -> float:
        return self._last_event(replica_id, SYNC).get("time", 0.0)

    def _last_event(self, replica_id: ReplicaId, *kinds: str) -> dict[str, Any]:
        try:
            return last_event(log_path(self.run_dir, replica_id).with_name(EVENTS), *kinds)
        except OSError:  # the disk is broken
            return {}

    def _phase(self, replica_id: ReplicaId) -> str:
        path = log_path(self.run_dir, replica_id).with_name(STATUS)
        return read_json(path).get("phase", "")

    def _write_phase(self, replica_id: ReplicaId, phase: str, **more: float) -> None:
        path = log_path(self.run_dir, replica_id).with_name(STATUS)
        try:
            replace_json(path, read_json(path) | {"phase": phase, **more})
        except OSError as error:  # a full disk must not end the groups that train
            log.warning("Cannot write %s, group %s is %s: %s", path, replica_id, phase, error)


def describe_end(status: int) -> str:
    """Say how a process ended.

    Args:
        status: Its exit status; negative if a signal ended it.
    """
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was ended by signal {-status}"


def has_joined(run_dir: Path, replica_id: int | str) -> bool:
    """Whether the callback of a group has written its status: the launcher's own has no steps."""
    status = read_json(log_path(run_dir, replica_id).with_name(STATUS))
    return "inner_steps" in status
