"""Keeps replica groups running: starts a group that dies again, and reports what happened."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from composer_replication.group.history import Error
from composer_replication.group.run_folder import REJECTED, ReplicaFolder
from composer_replication.group.words import plural
from composer_replication.launch.group import (
    FAILED,
    FINISHED,
    JOINED,
    LEFT_OUT,
    NOT_BACK,
    RESTARTING,
    STOPPED,
    TRAINING,
    Group,
)
from composer_replication.launch.output import BAD_INPUT
from composer_replication.launch.processes import POLL_S, ReplicaGroups, ReplicaId
from composer_replication.launch.run_record import Run
from composer_replication.util.fence import fence

SUPERVISED_HANG_TIMEOUT_S = 600.0
"""Seconds without any progress after which a group ends itself, where it is started again.

Where no supervisor does that, DiLoCo's own limit is longer.
"""

MAX_RESTARTS = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
START_RETRIES = 2
"""How often a command that fails before it has joined is started again.

Jobs that start at the same moment on one machine may disturb each other: StreamingDataset chooses
names for its shared memory that another job may take first.
"""

MISSING_CALLBACK = (
    "What trains there needs the callback: callbacks=[DiLoCoCallback()] (DiLoCoTrainerCallback, "
    "DiLoCoLightningCallback; llm-foundry: callbacks: {diloco: {}}). If it has it, leave "
    "coordinator_addr, lighthouse_addr and run_dir out of its arguments"
)

# The types of two errors that a group records. By name: importing the classes would import torch.
LOADS_NO_CHECKPOINT = "NothingToContinueFromError"
NOT_SOUND = "SyncError"


@dataclass
class GroupRecord:
    """What has happened to a group.

    Attributes:
        id: Its id.
        group: What it has written.
        restarts: How often it was started again.
        in_a_row: Restarts since the last sync to which it contributed.
        started_at: When it was started last, in seconds since 1970.
        due: When it is started again, by ``time.monotonic``; 0 while it runs or has ended for good.
        status: The exit status with which it ended for good; 0 before.
        end: The phase in which it ended for good; empty before.
        failed_starts: How often it had an error of its own before it joined.
        error: Why it has ended for good, in one line; empty where the end of its log says it.
        deaths: The exit statuses of all its early ends.
    """

    id: Any
    group: Group
    restarts: int = 0
    in_a_row: int = 0
    started_at: float = field(default_factory=time.time)
    due: float = 0.0
    status: int = 0
    end: str = ""
    failed_starts: int = 0
    error: str = ""
    deaths: list[int] = field(default_factory=list)

    def read(self) -> Group:
        """Return the group, with what it has written until now."""
        with suppress(OSError):  # the disk is broken
            self.group.read()
        return self.group

    @property
    def is_training(self) -> bool:
        """Whether its process runs, and has said that it has joined and not ended."""
        return not self.end and not self.due and self.read().phase in TRAINING

    @property
    def is_rejoining(self) -> bool:
        """Whether the group was started again and has not joined yet."""
        return self.restarts > 0 and self.read().phase in (RESTARTING, "joining")


@dataclass
class Supervisor:
    """Watches the groups until all have ended, one has failed for good, or the run is interrupted.

    A group that dies is started again after 1, 2, 4, ... s. It fails for good in three cases: its
    exit status says bad input, or its callback does and the group has never joined the others; it
    had an error of its own before it ever joined (an import, a setting) more than
    ``start_retries`` times, of which ``START_RETRIES`` count if it had trained to the end before,
    or once if every group had one, so that it is in the program; or it died after ``max_restarts``
    restarts in a row without a sync to which it contributed. If it was never restarted, that ends
    the run. Otherwise the group is left out, as long as others train. When all others have finished
    there is nothing to join, and the group is given up. A group that leaves since its pseudo-
    gradients are not sound, in a run in which nobody's are, ends the run.

    Args:
        groups: The processes.
        start: Starts a group, by its id.
        ids: The groups.
        max_restarts: Most restarts in a row; 0 for none.
        start_retries: How often a group that had an error of its own before it joined is started
            again nevertheless, because the reason may be outside of it.
        first_pause_s: Seconds before the first restart; each in a row waits twice as long.
        start_timeout_s: Seconds that the groups have to join, if they may lack the callback.
        say: Gets a line for each early end of a group with what follows from it, and once, after
            ``start_timeout_s``, a line about those that have not joined.

    Attributes:
        run: What the groups have recorded.
        records: What has happened to each group, by its id.
    """

    groups: ReplicaGroups
    start: Callable[[Any], None]
    ids: Collection[ReplicaId]
    max_restarts: int
    start_retries: int = 0
    first_pause_s: float = FIRST_PAUSE_S
    start_timeout_s: float = math.inf
    say: Callable[[str], object] = print

    def __post_init__(self) -> None:
        self.run = Run(self.groups.run_dir, self.ids)
        groups = self.run.groups
        self.records: dict[Any, GroupRecord] = {
            id: GroupRecord(id, groups[str(id)]) for id in self.ids
        }
        self._join_by = time.monotonic() + self.start_timeout_s

    def watch(self, on_poll: Callable[[Supervisor], object] | None = None) -> dict[Any, int]:
        """Watch the groups until the end.

        Args:
            on_poll: Called several times a second until the end.

        Returns:
            The exit statuses of the groups that failed for good; empty if none did.
        """
        records = self.records.values()
        while True:
            self._poll()
            failed = {each.id: each.status for each in records if each.end == FAILED}
            if failed or all(each.end for each in records) or self.groups.interrupts.count:
                for record in records:
                    if record.due:
                        self._enter(record, STOPPED)
                return failed
            self._say_who_is_late()
            if on_poll is not None:
                on_poll(self)
            time.sleep(POLL_S)

    @fence("which groups have not joined")
    def _say_who_is_late(self) -> None:
        if time.monotonic() < self._join_by:
            return
        self._join_by = math.inf
        missing = [
            str(record.id)
            for record in self.records.values()
            if not record.deaths  # after a death its own errors say more
            and not record.read().has_joined
        ]
        if missing:
            after = f"after {plural(round(self.start_timeout_s), 'second')}"
            who = ", ".join(missing)
            self.say(f"Replica group {who} has not joined {after}. {MISSING_CALLBACK}")

    @property
    def restarts(self) -> dict[str, int]:
        """How often each group was started again, by its id."""
        return {str(replica_id): record.restarts for replica_id, record in self.records.items()}

    def _poll(self) -> None:
        for replica_id, status in self.groups.exit_statuses().items():
            record = self.records[replica_id]
            if record.end:
                continue
            if record.due:
                self._start_again_if_due(record)
            elif status == 0 or (status == 1 and self._has_learned_nothing(record)):
                self._end(record, 0, FINISHED)
            elif status is not None:
                self._handle_death(record, status)
            elif record.is_rejoining and self._has_nobody_to_join(record):
                self._end(record, 1, NOT_BACK)

    def _handle_death(self, record: GroupRecord, status: int) -> None:
        record.deaths.append(status)
        self.groups.end(record.id)  # kills ranks and loader workers that outlived their parent
        if record.read().contributed_at > record.started_at:
            record.in_a_row = 0
        end = f"group {record.id} {describe_end(status)}"
        phase, status, then = self._judge(record, status)
        if phase:
            self._end(record, status, phase)
            self.say(end + then)
            return
        pause_s = min(LONGEST_PAUSE_S, self.first_pause_s * 2**record.in_a_row)
        record.due = time.monotonic() + pause_s
        self._enter(record, RESTARTING, restart_at=time.time() + pause_s)
        restart = f"restart {record.in_a_row + 1} of {self.max_restarts}"
        self.say(f"{end}, starts again in {pause_s:.0f} s ({restart})")

    def _judge(self, record: GroupRecord, status: int) -> tuple[str, int, str]:
        """Decide about a group that has died.

        Returns:
            The phase in which it has ended for good, empty if it is started again; its exit
            status then; and what follows, for people.
        """
        group = record.group
        if self._has_nobody_to_join(record):
            return NOT_BACK, 1, "; it is too late to join the others again"
        errors = [each for each in group.errors if each.time >= record.started_at]
        error = errors[-1] if errors else Error(0.0, "", "")
        # It has left since its pseudo-gradients were not sound. If nobody's are, a restart is vain.
        if error.kind == NOT_SOUND and (failure := self._failure):
            record.error = failure
            return FAILED, 1, ", and is not started again"
        if group.phase == REJECTED:
            status = BAD_INPUT  # a user's script may end with any status
            # What was accepted once may be rejected for a reason that passes, such as a host name
            # that does not resolve while the machine starts. A script that loads no checkpoint
            # stays one.
            was_accepted = group.newest or group.starts
            is_hopeless = not was_accepted or error.kind == LOADS_NO_CHECKPOINT
        else:
            is_hopeless = status == BAD_INPUT or self._has_failed_to_start(record, status)
        if not is_hopeless and record.in_a_row < self.max_restarts:
            return "", status, ""
        if is_hopeless and group.phase not in JOINED:
            said = error.text or self.groups.last_line(record.id)
            record.error = said.removeprefix("Error: ")
            if self._none_can_start:
                status = BAD_INPUT  # the program would end so at each start
        trained = ": it had trained to the end before" if group.result else ""
        others = [each for each in self.records.values() if each is not record]
        if record.restarts and any(each.is_training for each in others):
            return LEFT_OUT, status, f"; the others go on without it{trained}"
        return FAILED, status, f", and is not started again{trained}"

    def _has_failed_to_start(self, own: GroupRecord, status: int) -> bool:
        """Whether a group ended with an error of its own before it joined, in its first process.

        A signal is no such error. Nor is the end of a group after another one has died: while a
        group waits for the start, its error may be that the other is missing.
        """
        is_signal = status < 0 or status >= 128  # Composer's launcher exits with -9 as 247
        has_died = any(
            len(record.deaths) - (record is own) > record.failed_starts
            for record in self.records.values()
        )
        if is_signal or has_died or own.group.phase in JOINED:
            return False
        own.failed_starts += 1
        retries = self.start_retries
        if own.group.result:  # before this process: there may be nothing left to do
            retries = min(retries, START_RETRIES)
        return own.failed_starts > retries or self._none_can_start

    @property
    def _none_can_start(self) -> bool:
        """Whether each of several groups had an error of its own before it joined."""
        has_failed = [record.failed_starts > 0 for record in self.records.values()]
        return len(has_failed) > 1 and all(has_failed)

    def _start_again_if_due(self, record: GroupRecord) -> None:
        if time.monotonic() < record.due:
            return
        record.due = 0.0
        record.restarts += 1
        record.in_a_row += 1
        record.started_at = time.time()
        try:
            self.start(record.id)
        except OSError as error:  # no more processes: its old exit status counts as another death
            self.say(f"group {record.id} cannot be started: {error}")

    @property
    def _failure(self) -> str:
        """Why nobody learns anything any more, see ``Run.failure``; empty as long as they do."""
        for record in self.records.values():
            record.read()
        return self.run.failure

    def _has_learned_nothing(self, record: GroupRecord) -> bool:
        """Whether a group has trained to the end, and was no success although nothing failed.

        `train` then ends with status 1. It is no death: the run is judged when all have ended.
        """
        group = record.read()
        return bool(group.result and group.failure)

    def _has_nobody_to_join(self, record: GroupRecord) -> bool:
        """Whether some groups have finished, and none is training that this group could join."""
        others = [each for each in self.records.values() if each is not record]
        has_finished = any(each.end == FINISHED for each in others)
        return has_finished and all(each.end or each.due or each.is_rejoining for each in others)

    def _end(self, record: GroupRecord, status: int, phase: str) -> None:
        """Note that a group has ended for good."""
        self.groups.end(record.id)
        record.read()  # for ``run``, which is judged after the end
        record.end = phase
        record.due = 0.0
        record.status = status
        self._enter(record, phase)

    def _enter(self, record: GroupRecord, phase: str, **more: float) -> None:
        with fence(f"that group {record.id} is {phase}"):  # its folder may be gone
            ReplicaFolder(self.groups.run_dir, record.id).enter(phase, **more)


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
