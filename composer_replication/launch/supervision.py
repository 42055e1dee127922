"""Keeps replica groups running: a group that dies is started again, after a pause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from composer_replication.callback.run_folder import METRICS, STATUS, log_path
from composer_replication.launch.errors import BAD_INPUT
from composer_replication.launch.processes import POLL_S, Interrupts, ReplicaGroups
from composer_replication.replica.json_files import read_json, replace_json

HANG_TIMEOUT_S = 600.0
"""After how long without any progress a group ends itself, in seconds."""

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

JOINED = ("training", "evaluating", "finished")
"""The phases of a group that has joined the others."""


@dataclass
class GroupRecord:
    """What has happened to a group.

    Attributes:
        restarts: How often it was started again.
        in_a_row: Of these, since it last committed a sync.
        committed: Bytes of its metrics when it was last started.
        due: When to start it again; None while it runs or has ended for good.
        status: The exit status it ended with for good; None before.
        is_given_up: Whether it died when there was no one left to join.
        is_left_out: Whether it could not be kept running, and the others went on without it.
        deaths: The exit statuses of its lives that ended too early.
    """

    restarts: int = 0
    in_a_row: int = 0
    committed: int = 0
    due: float | None = None
    status: int | None = None
    is_given_up: bool = False
    is_left_out: bool = False
    deaths: list[int] = field(default_factory=list)


@dataclass
class Supervisor:
    """Watches the groups until all have ended, one has failed for good, or we are interrupted.

    A group that dies is started again, after 1, 2, 4, ... s. It has failed for good if its exit
    status says bad input, if it had an error of its own before it ever joined the others (an
    import, a setting: its next start would fail too), or after ``max_restarts`` in a row without a
    sync of its own. In its first life that ends the run; later it is left out, as long as others
    train. When all others have finished there is nothing to join, and it is given up.

    Args:
        groups: The processes.
        run_dir: The run's folder.
        start: Starts a group, by its id.
        replicas: How many there are.
        max_restarts: How often in a row; 0 for never.
        interrupts: Ends the watch.
    """

    groups: ReplicaGroups
    run_dir: Path
    start: Callable[[int], None]
    replicas: int
    max_restarts: int
    interrupts: Interrupts
    records: dict[int, GroupRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.records = {replica_id: GroupRecord() for replica_id in range(self.replicas)}

    def watch(self, show: Callable[[dict[int, int | None], bool], None]) -> dict[int, int]:
        """Watch, and ``show(exit statuses, is last)`` all the while.

        Returns:
            The exit statuses of the groups that failed for good; empty if none did.
        """
        while True:
            self._look()
            failed = {
                replica_id: record.status
                for replica_id, record in self.records.items()
                if record.status and not (record.is_given_up or record.is_left_out)
            }
            statuses = {replica_id: record.status for replica_id, record in self.records.items()}
            is_over = None not in statuses.values()
            if failed or is_over or self.interrupts.count:
                show(statuses, True)
                return failed
            show(statuses, False)
            time.sleep(POLL_S)

    @property
    def restarts(self) -> dict[str, int]:
        """How often each group was started again, by its name."""
        return {str(replica_id): record.restarts for replica_id, record in self.records.items()}

    def trains(self, replica_id: int) -> bool:
        """Whether a group is in training now."""
        record = self.records[replica_id]
        is_there = record.status is None and record.due is None
        return is_there and self._phase(replica_id) == "training"

    def _look(self) -> None:
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
                self._has_died(replica_id, record, status)
            elif self._is_out(replica_id, record) and self._is_left_alone(replica_id):
                self._give_up(replica_id, record)

    def _has_died(self, replica_id: int, record: GroupRecord, status: int) -> None:
        record.deaths.append(status)
        self.groups.end(replica_id)  # ranks and loader workers that have outlived their parent
        if self._metrics_size(replica_id) > record.committed:
            record.in_a_row = 0
        if self._is_left_alone(replica_id):
            self._give_up(replica_id, record)
            return
        is_hopeless = status == BAD_INPUT or self._has_failed_to_start(replica_id, status)
        if is_hopeless or record.in_a_row >= self.max_restarts:
            record.status = status
            record.is_left_out = record.restarts > 0 and any(map(self.trains, self.records))
            if record.is_left_out:
                self._say_phase(replica_id, "left out")
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**record.in_a_row)
        record.due = time.monotonic() + pause_s
        self._say_phase(replica_id, "restarting")

    def _has_failed_to_start(self, replica_id: int, status: int) -> bool:
        """Whether a group ended with an error of its own before it had joined, in its first life.

        Not if a signal ended it, nor once a group has died: what one that waits for the start then
        says may be that the other is missing.
        """
        is_signal = status < 0 or status >= 128  # Composer's launcher exits with -9 as 247
        has_died = any(record.restarts or record.due for record in self.records.values())
        return not is_signal and not has_died and self._phase(replica_id) not in JOINED

    def _start_again_if_due(self, replica_id: int, record: GroupRecord) -> None:
        if time.monotonic() < (record.due or 0.0):
            return
        record.due = None
        record.restarts += 1
        record.in_a_row += 1
        record.committed = self._metrics_size(replica_id)
        self.start(replica_id)

    def _is_left_alone(self, replica_id: int) -> bool:
        """Whether some have finished, and nobody is left in training whom this group could join."""
        others = {id: record for id, record in self.records.items() if id != replica_id}
        has_ended = any(record.status == 0 for record in others.values())
        return has_ended and all(
            record.status is not None or record.due is not None or self._is_out(id, record)
            for id, record in others.items()
        )

    def _is_out(self, replica_id: int, record: GroupRecord) -> bool:
        """Whether a group was started again and has not joined yet."""
        return bool(record.restarts) and self._phase(replica_id) in ("restarting", "joining")

    def _give_up(self, replica_id: int, record: GroupRecord) -> None:
        self.groups.end(replica_id)
        record.is_given_up, record.due, record.status = True, None, 1
        self._say_phase(replica_id, "not back")

    def _metrics_size(self, replica_id: int) -> int:
        path = log_path(self.run_dir, replica_id).with_name(METRICS)
        try:
            return path.stat().st_size
        except OSError:  # there is no sync yet, or the disk is broken
            return 0

    def _phase(self, replica_id: int) -> str:
        path = log_path(self.run_dir, replica_id).with_name(STATUS)
        return read_json(path).get("phase", "")

    def _say_phase(self, replica_id: int, phase: str) -> None:
        path = log_path(self.run_dir, replica_id).with_name(STATUS)
        try:
            replace_json(path, read_json(path) | {"phase": phase})
        except OSError as error:  # a full disk must not end the groups that train
            log.warning("Cannot write %s (%s): group %d is %s", path, error, replica_id, phase)


class Saboteur(Protocol):
    """Does harm to a run on purpose."""

    def __call__(self, supervisor: Supervisor) -> None:
        """Called all the while."""

    def seconds_left(self) -> float | None:
        """Until it ends training; None if that is not known yet."""
