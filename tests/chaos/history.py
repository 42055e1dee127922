"""Records what happens to a run under faults, and checks what must never happen."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.coordinator.server import STATE
from composer_replication.group.run_folder import EVENTS, SYNC, log_path
from composer_replication.launch.supervision import Supervisor
from composer_replication.util.json_files import JsonLineReader, replace_json

from .at_start.fault_injection import IN_GROUP_KINDS, fault_began_at

CHAOS = "chaos.json"
"""In the run's folder: the faults, what happened, and the verdict."""

DEADLY = ("kill", "end", "first_round", "hang")
"""Faults after which a group has to be started again."""

SERVICES = ("lighthouse", "coordinator")
"""Faults that hit a service and no group."""


@dataclass
class InjectedFault:
    """A fault that was injected into a run.

    Attributes:
        number: From 1 on.
        kind: The kind; see ``CONTRIBUTING.md``.
        victims: The groups that it hits; none for a fault of a service. For ``one_way``, the first
            group cannot reach the second.
        seconds: Duration; None: until the group is started again.
        ends_at: When it is over, in seconds since all groups trained; None if that is not known.
        how: ``killed`` or ``stopped``, for a service.
        at: When it was injected, in seconds since all groups trained.
        deaths_before: How often each victim had died by then.
        waiting: Groups that have not committed a sync since the fault was over.
        recovered_s: Seconds from the fault until the last of these committed.
        next_commit_s: Seconds from the fault until the next commit of each other group.
    """

    number: int
    kind: str
    victims: tuple[int, ...] = ()
    seconds: float | None = 0.0
    how: str = ""
    at: float = 0.0
    ends_at: float | None = None
    deaths_before: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    recovered_s: float | None = None
    next_commit_s: dict[int, float] = field(default_factory=dict)

    @property
    def needs_restart(self) -> bool:
        """Whether a victim recovers only after it was started again."""
        return self.kind in DEADLY or self.seconds is None


class History:
    """Reads the groups' metrics as they are written, and checks them.

    These must never happen: two groups differ after an outer step; a group that has recovered from
    every fault dies, loses inner steps or repeats an outer step; a leased sample is trained on
    twice.

    Args:
        run_dir: The run's folder.
        replicas: Number of groups.
        about: What is needed to repeat the run, for ``chaos.json``.
    """

    def __init__(self, run_dir: Path, replicas: int, about: Mapping[str, Any]) -> None:
        self.run_dir = run_dir
        self._about = about
        self.faults: list[InjectedFault] = []
        self.events: list[dict[str, Any]] = []
        self.violations: list[dict[str, Any]] = []
        self.commits = {replica_id: 0 for replica_id in range(replicas)}
        self.digests: dict[int, tuple[str, int]] = {}
        self.began: float | None = None
        self._began_at: float | None = None
        self._metrics = {
            replica_id: JsonLineReader(log_path(run_dir, replica_id).with_name(EVENTS))
            for replica_id in self.commits
        }
        self._last_step = dict.fromkeys(self.commits, 0)
        self._deaths = dict.fromkeys(self.commits, 0)
        self._samples_twice = 0

    def begin(self) -> None:
        """Start the clock. From now on all groups train."""
        self.began = time.monotonic()
        self._began_at = time.time()

    def now(self) -> float:
        """The seconds since all groups trained."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def open_faults(self, replica_id: int | None = None) -> list[InjectedFault]:
        """The faults from which a group has not recovered yet, of one group or of all."""
        return [
            fault
            for fault in self.faults
            if fault.recovered_s is None and (replica_id is None or replica_id in fault.victims)
        ]

    def record(self, fault: InjectedFault) -> None:
        """Record a fault. Call it at the moment at which the fault is injected."""
        fault.at = self.now()
        fault.deaths_before = {victim: self._deaths[victim] for victim in fault.victims}
        fault.waiting = set(fault.victims or self.commits)
        self.faults.append(fault)
        groups = " and ".join(f"group {victim}" for victim in fault.victims)
        lasts = " for good" if fault.seconds is None else f" for {fault.seconds:.1f} s"
        lasts = lasts if fault.seconds != 0 else ""
        self._append(f"{fault.kind} {groups or fault.how}{lasts}", self.events)

    def check(self, supervisor: Supervisor) -> None:
        """Read what the groups have added to their metrics, and check every line."""
        for replica_id, record in supervisor.records.items():
            for line in self._metrics[replica_id].read():
                if line.get("event") == SYNC:
                    self._record_commit(replica_id, line)
            for status in record.deaths[self._deaths[replica_id] :]:
                self._record_death(replica_id, status)
        self._check_samples()

    def _record_commit(self, replica_id: int, line: Mapping[str, Any]) -> None:
        step, digest = int(line["diloco/outer_step"]), line.get("diloco/global_digest", "")
        first, whose = self.digests.setdefault(step, (digest, replica_id))
        if first != digest:
            self._record_violation(
                f"groups {whose} and {replica_id} differ after outer step {step}"
            )
        if step <= self._last_step[replica_id]:
            self._record_violation(f"group {replica_id} is at outer step {step} again")
        lost = int(line["diloco/steps_lost"])
        if lost and not self.open_faults(replica_id):
            self._record_violation(
                f"group {replica_id} lost {lost} inner steps before {step} without a fault"
            )
        self._last_step[replica_id] = step
        self.commits[replica_id] += 1
        for fault in self.faults:
            if replica_id not in fault.victims:
                fault.next_commit_s.setdefault(replica_id, self.now() - fault.at)
        for fault in self.open_faults():
            self._update_recovery(fault, replica_id)

    def _update_recovery(self, fault: InjectedFault, replica_id: int) -> None:
        now = self.now()
        ends_at = self._ends_at(fault)
        fault.ends_at = None if ends_at == float("inf") else ends_at
        has_restarted = self._deaths[replica_id] > fault.deaths_before.get(replica_id, -1)
        if now < ends_at or (fault.needs_restart and not has_restarted):
            return
        fault.waiting.discard(replica_id)
        if not fault.waiting:
            fault.recovered_s = now - fault.at
            self._append(f"recovered from fault {fault.number}", self.events)

    def _ends_at(self, fault: InjectedFault) -> float:
        """When the fault itself is over; infinite if that is not known yet."""
        if fault.kind not in IN_GROUP_KINDS or self.began is None:
            return fault.at + (fault.seconds or 0.0)
        folder = log_path(self.run_dir, fault.victims[0]).parent
        began_at = fault_began_at(folder, fault.number)
        return float("inf") if began_at is None else began_at - self.began + (fault.seconds or 0.0)

    def _record_death(self, replica_id: int, status: int) -> None:
        self._deaths[replica_id] += 1
        self._append(f"group {replica_id} ended with status {status}", self.events)
        if not self.open_faults(replica_id):
            self._record_violation(f"group {replica_id} ended with status {status} without a fault")

    def _check_samples(self) -> None:
        twice = samples_trained_twice(self.run_dir / STATE)
        if twice > self._samples_twice:
            self._record_violation(
                f"{twice - self._samples_twice} leased samples were trained on twice"
            )
            self._samples_twice = twice

    def _record_violation(self, what: str) -> None:
        self._append(what, self.violations)

    def _append(self, what: str, where: list[dict[str, Any]]) -> None:
        where.append({"at": round(self.now(), 2), "what": what})
        self.write({})  # at every event: the command itself may be killed

    def verdict(self, final_digests: Mapping[str, str]) -> dict[str, Any]:
        """Summarize the run; see ``CONTRIBUTING.md``.

        Args:
            final_digests: The digest with which each group ended.
        """
        faults, last = self.faults, max(self.digests, default=0)
        missing = set(range(1, last + 1)) - self.digests.keys()
        kinds = sorted({fault.kind for fault in faults})
        are_equal = len(set(final_digests.values())) == 1
        not_recovered = len(self.open_faults())
        return {
            "faults": len(faults),
            "kinds": {kind: sum(s.kind == kind for s in faults) for kind in kinds},
            "commits": sum(self.commits.values()),
            "outer_steps": last,
            "outer_steps_missing": len(missing),
            "violations": len(self.violations),
            "seconds_to_survivors_next_commit": {
                kind: spread(s for t in faults if t.kind == kind for s in t.next_commit_s.values())
                for kind in kinds
            },
            "seconds_to_recovery": {
                kind: spread(t.recovered_s for t in faults if t.kind == kind) for kind in kinds
            },
            "not_recovered": not_recovered,
            "final_digests_equal": are_equal,
            "is_clean": are_equal and not (missing or self.violations or not_recovered),
        }

    def write(self, verdict: Mapping[str, Any]) -> None:
        """Write ``chaos.json``: faults, events and violations, each in the order of their times."""
        faults = [asdict(fault) | {"waiting": sorted(fault.waiting)} for fault in self.faults]
        # The verdict has the number of faults under the key "faults".
        records = {"began_at": self._began_at, "injected": faults}
        records |= {"events": self.events, "violations": self.violations}
        replace_json(self.run_dir / CHAOS, {**self._about, **verdict, **records}, indent=2)


def samples_trained_twice(database: Path) -> int:
    """The number of leased samples that are in the model twice, by the coordinator's database."""
    if not database.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            (count,) = connection.execute("SELECT sum(trained_twice) FROM epochs").fetchone()
    except sqlite3.OperationalError:  # the coordinator is creating the file, or restarting
        return 0
    return count or 0


def spread(seconds: Iterable[float | None]) -> Mapping[str, float]:
    """Median, maximum and number of the values that are not None."""
    values = [each for each in seconds if each is not None]
    if not values:
        return {}
    median, longest = statistics.median(values), max(values)
    return {"median": round(median, 1), "max": round(longest, 1), "count": len(values)}
