"""What happens to a run under faults, and what must never happen, checked while it goes on."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.callback.run_folder import METRICS, log_path
from composer_replication.coordinator.server import STATE
from composer_replication.launch.fault_injection import ORDERED, obeyed_at
from composer_replication.launch.supervision import Supervisor
from composer_replication.replica.json_files import JsonLineReader, replace_json

CHAOS = "chaos.json"

DEADLY = ("kill", "end", "first_round", "hang")
"""The faults after which a group has to be started again."""

SERVICES = ("lighthouse", "coordinator")


@dataclass
class Strike:
    """A fault.

    Attributes:
        number: From 1 on.
        kind: See ``docs/chaos.md``.
        victims: The groups that are struck; none by a fault of a service. Of two the first one
            cannot reach the second one.
        seconds: How long it lasts; None: until the group is started again.
        how: ``killed`` or ``stopped``, for a service.
        at: When, in seconds since all groups trained.
        lives: How many lives each victim had lost by then.
        waiting: The groups that have not committed since it was over.
        recovered_s: Until the last of these had, in seconds from the strike.
        next_commit_s: Until each other group's next commit.
    """

    number: int
    kind: str
    victims: tuple[int, ...] = ()
    seconds: float | None = 0.0
    how: str = ""
    at: float = 0.0
    lives: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    recovered_s: float | None = None
    next_commit_s: dict[int, float] = field(default_factory=dict)

    @property
    def needs_new_life(self) -> bool:
        return self.kind in DEADLY or self.seconds is None


class History:
    """Reads the groups' metrics as they come, and checks them.

    Must never happen: two groups differ after an outer step; a group dies, throws inner steps away
    or goes back, and nothing had been done to it since it last committed; a leased sample is
    trained on twice.

    Args:
        run_dir: The run's folder.
        replicas: How many groups there are.
        about: What repeats it, for ``chaos.json``.
    """

    def __init__(self, run_dir: Path, replicas: int, about: Mapping[str, Any]) -> None:
        self.run_dir = run_dir
        self._about = about
        self.strikes: list[Strike] = []
        self.events: list[dict[str, Any]] = []
        self.violations: list[dict[str, Any]] = []
        self.commits = {replica_id: 0 for replica_id in range(replicas)}
        self.digests: dict[int, tuple[str, int]] = {}
        self.began: float | None = None
        self._metrics = {
            replica_id: JsonLineReader(log_path(run_dir, replica_id).with_name(METRICS))
            for replica_id in self.commits
        }
        self._last_step = dict.fromkeys(self.commits, 0)
        self._deaths = dict.fromkeys(self.commits, 0)
        self._samples_twice = 0

    def begin(self) -> None:
        """Start the clock: from now on all groups train."""
        self.began = time.monotonic()

    def now(self) -> float:
        """Seconds since all groups trained."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def open_strikes(self, replica_id: int | None = None) -> list[Strike]:
        """Those that somebody has not recovered from yet, of one group or all."""
        return [
            strike
            for strike in self.strikes
            if strike.recovered_s is None and (replica_id is None or replica_id in strike.victims)
        ]

    def add(self, strike: Strike) -> None:
        """A strike, at the moment at which it is made."""
        strike.at = self.now()
        strike.lives = {victim: self._deaths[victim] for victim in strike.victims}
        strike.waiting = set(strike.victims or self.commits)
        self.strikes.append(strike)
        groups = " and ".join(f"group {victim}" for victim in strike.victims)
        lasts = " for good" if strike.seconds is None else f" for {strike.seconds:.1f} s"
        lasts = lasts if strike.seconds != 0 else ""
        self._tell(f"{strike.kind} {groups or strike.how}{lasts}", self.events)

    def look(self, supervisor: Supervisor) -> None:
        """Read the lines that groups have added to their metrics, and check each one."""
        for replica_id, record in supervisor.records.items():
            for line in self._metrics[replica_id].read():
                self._commit(replica_id, line)
            for status in record.deaths[self._deaths[replica_id] :]:
                self._die(replica_id, status)
        self._check_samples()

    def _commit(self, replica_id: int, line: Mapping[str, Any]) -> None:
        step, digest = int(line["diloco/outer_step"]), line.get("diloco/global_digest", "")
        first, whose = self.digests.setdefault(step, (digest, replica_id))
        if first != digest:
            self._break(f"groups {whose} and {replica_id} differ after outer step {step}")
        if step <= self._last_step[replica_id]:
            self._break(f"group {replica_id} is at outer step {step} again")
        lost = int(line["diloco/steps_lost"])
        if lost and not self.open_strikes(replica_id):
            self._break(f"group {replica_id}, not struck, lost {lost} inner steps before {step}")
        self._last_step[replica_id] = step
        self.commits[replica_id] += 1
        for strike in self.strikes:
            if replica_id not in strike.victims:
                strike.next_commit_s.setdefault(replica_id, self.now() - strike.at)
        for strike in self.open_strikes():
            self._recover(strike, replica_id)

    def _recover(self, strike: Strike, replica_id: int) -> None:
        now = self.now()
        is_new_life = self._deaths[replica_id] > strike.lives.get(replica_id, -1)
        if now < self._end_of(strike) or (strike.needs_new_life and not is_new_life):
            return
        strike.waiting.discard(replica_id)
        if not strike.waiting:
            strike.recovered_s = now - strike.at
            self._tell(f"recovered from strike {strike.number}", self.events)

    def _end_of(self, strike: Strike) -> float:
        """When the fault itself is over; infinite if that is not known yet."""
        if strike.kind not in ORDERED or self.began is None:
            return strike.at + (strike.seconds or 0.0)
        folder = log_path(self.run_dir, strike.victims[0]).parent
        obeyed = obeyed_at(folder, strike.number)
        return float("inf") if obeyed is None else obeyed - self.began + (strike.seconds or 0.0)

    def _die(self, replica_id: int, status: int) -> None:
        self._deaths[replica_id] += 1
        self._tell(f"group {replica_id} ended with status {status}", self.events)
        if not self.open_strikes(replica_id):
            self._break(f"group {replica_id}, not struck, ended with status {status}")

    def _check_samples(self) -> None:
        twice = samples_trained_twice(self.run_dir / STATE)
        if twice > self._samples_twice:
            self._break(f"{twice - self._samples_twice} leased samples were trained on twice")
            self._samples_twice = twice

    def _break(self, what: str) -> None:
        self._tell(what, self.violations)

    def _tell(self, what: str, where: list[dict[str, Any]]) -> None:
        where.append({"at": round(self.now(), 2), "what": what})
        self.write({})  # now: nobody knows what ends the run

    def verdict(self, final_digests: Mapping[str, str]) -> dict[str, Any]:
        """What came of it all; see ``docs/chaos.md``.

        Args:
            final_digests: With which each group ended.
        """
        strikes, last = self.strikes, max(self.digests, default=0)
        missing = set(range(1, last + 1)) - self.digests.keys()
        kinds = sorted({strike.kind for strike in strikes})
        are_equal = len(set(final_digests.values())) == 1
        not_back = len(self.open_strikes())
        return {
            "faults": len(strikes),
            "kinds": {kind: sum(s.kind == kind for s in strikes) for kind in kinds},
            "commits": sum(self.commits.values()),
            "outer_steps": last,
            "outer_steps_missing": len(missing),
            "violations": len(self.violations),
            "seconds_to_survivors_next_commit": {
                kind: spread(s for t in strikes if t.kind == kind for s in t.next_commit_s.values())
                for kind in kinds
            },
            "seconds_to_recovery": {
                kind: spread(t.recovered_s for t in strikes if t.kind == kind) for kind in kinds
            },
            "not_back": not_back,
            "final_digests_equal": are_equal,
            "is_clean": are_equal and not (missing or self.violations or not_back),
        }

    def write(self, verdict: Mapping[str, Any]) -> None:
        """Write ``chaos.json``: strikes, events and violations in the order of their coming."""
        strikes = [asdict(strike) | {"waiting": sorted(strike.waiting)} for strike in self.strikes]
        told = {"strikes": strikes, "events": self.events, "violations": self.violations}
        replace_json(self.run_dir / CHAOS, {**self._about, **verdict, **told}, indent=2)


def samples_trained_twice(database: Path) -> int:
    """Leased samples that are in the model twice, by the coordinator's records."""
    if not database.exists():
        return 0
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            (count,) = connection.execute("SELECT sum(trained_twice) FROM epochs").fetchone()
    except sqlite3.OperationalError:  # it is just being made, or started again
        return 0
    return count or 0


def spread(seconds: Iterable[float | None]) -> Mapping[str, float]:
    """Median, maximum and number of those that are known."""
    known = [each for each in seconds if each is not None]
    if not known:
        return {}
    median, longest = statistics.median(known), max(known)
    return {"median": round(median, 1), "max": round(longest, 1), "count": len(known)}
