"""Train while groups are killed, stopped and ended at random, and tell what it cost."""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from composer_replication.config import ConfigError
from composer_replication.json_files import read_json
from composer_replication.launch import launch
from composer_replication.run_folder import STATUS, STOP, log_path, make_run_folder
from composer_replication.run_record import Run, read_run
from composer_replication.supervision import Supervisor

CHAOS = "chaos.json"
ENDLESS = "1000000000ba"
MAX_RESTARTS = 1000
STOPPED_S = (1.0, 8.0)
"""How long a group is stopped: within the heartbeat's timeout, or beyond it."""

QUIET_START_S, QUIET_END_S = 5.0, 45.0
"""Without faults: until the groups have started, and for the last ones to be back."""

KINDS = ("kill", "kill", "stop", "end")


@dataclass
class Strike:
    """A fault: ``kill`` is SIGKILL to the whole process tree, ``end`` is SIGTERM, ``stop`` is
    SIGSTOP and, ``seconds`` later, SIGCONT."""

    time: float
    kind: str
    replica_id: int
    seconds: float = 0.0


@dataclass
class Saboteur:
    """Strikes at random times, and never the last group that trains.

    Args:
        faults_per_minute: On average.
        duration_s: How long training takes.
        seed: Of the times, the kinds and the victims.
    """

    faults_per_minute: float
    duration_s: float
    seed: int
    strikes: list[Strike] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._began: float | None = None
        self._next = 0.0
        self._stopped: dict[int, float] = {}

    def __call__(self, supervisor: Supervisor) -> None:
        now = time.time()
        for replica_id, until in list(self._stopped.items()):
            if now >= until:
                supervisor.groups.signal(replica_id, signal.SIGCONT)
                del self._stopped[replica_id]
        training = [id for id in supervisor.records if self._trains(supervisor, id)]
        if self._began is None:
            if len(training) == supervisor.replicas:
                self._began = now
                self._next = now + QUIET_START_S
            return
        ends = self._began + self.duration_s
        if now > ends:
            (supervisor.run_dir / STOP).touch()
        if now > ends - QUIET_END_S or now < self._next or len(training) < 2:
            return
        self._strike(supervisor, self._random.choice(training), now)
        self._next = now + self._random.uniform(0.5, 1.5) * 60 / self.faults_per_minute

    def _trains(self, supervisor: Supervisor, replica_id: int) -> bool:
        record = supervisor.records[replica_id]
        if record.status is not None or record.due is not None or replica_id in self._stopped:
            return False
        path = log_path(supervisor.run_dir, replica_id).with_name(STATUS)
        return read_json(path).get("phase") == "training"

    def _strike(self, supervisor: Supervisor, replica_id: int, now: float) -> None:
        strike = Strike(now, self._random.choice(KINDS), replica_id)
        if strike.kind == "kill":
            supervisor.groups.signal(replica_id, signal.SIGKILL)
        elif strike.kind == "end":
            supervisor.groups.signal(replica_id, signal.SIGTERM)
        else:
            strike.seconds = self._random.uniform(*STOPPED_S)
            self._stopped[replica_id] = now + strike.seconds
            supervisor.groups.signal(replica_id, signal.SIGSTOP)
        self.strikes.append(strike)


def chaos(
    config: dict[str, Any],
    config_path: str | Path,
    *,
    replicas: int,
    nproc: int,
    faults_per_minute: float,
    duration_s: float,
    seed: int,
) -> int:
    """Launch a config for a while under faults, and write ``chaos.json`` and a table.

    Args:
        config: From ``load_config``. It trains for ``duration_s`` instead of ``max_duration``, at a
            constant learning rate, and digests are compared at every outer step.
        config_path: Where it was read.
        replicas: Replica groups, 2 or more.
        nproc: Processes in each.
        faults_per_minute: How often a fault strikes.
        duration_s: How long training takes.
        seed: Of what strikes whom, and when.

    Returns:
        An exit status: 0 if nothing was lost and nobody diverged.
    """
    if replicas < 2:
        raise ConfigError(f"--replicas {replicas}: chaos needs 2 or more, one has to survive")
    callbacks = dict(config.get("callbacks") or {})
    callbacks["diloco"] = dict(callbacks.get("diloco") or {}) | {"digest_every": 1}
    config = config | {"callbacks": callbacks, "max_duration": ENDLESS}
    config.pop("eval_interval", None)
    config.pop("scheduler", None)  # it has no end to go to
    config["run_dir"] = str(make_run_folder(config, config_path))
    saboteur = Saboteur(faults_per_minute, duration_s, seed)
    status = launch(
        config,
        config_path,
        replicas=replicas,
        nproc=nproc,
        max_restarts=MAX_RESTARTS,
        saboteur=saboteur,
    )
    run_dir = Path(config["run_dir"])
    verdict = judge(read_run(run_dir), saboteur.strikes)
    report = verdict | {"strikes": [asdict(strike) for strike in saboteur.strikes]}
    (run_dir / CHAOS).write_text(json.dumps(report, indent=2) + "\n")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in verdict.items():
        table.add_row(name.replace("_", " "), _in_words(value))
    Console(highlight=False).print(table)
    return status or int(not verdict["is_clean"])


def judge(run: Run, strikes: Iterable[Strike]) -> dict[str, Any]:
    """What the metrics of a run say of its faults. See ``docs/chaos.md`` for what counts as what.

    Args:
        run: Read from its folder, with a digest at every outer step.
        strikes: What was done to it.
    """
    strikes = sorted(strikes, key=lambda strike: strike.time)
    digests: dict[int, set[str]] = {}
    for lines in run.metrics.values():
        for line in lines:
            digests.setdefault(int(line["diloco/outer_step"]), set()).add(
                line["diloco/global_digest"]
            )
    last = max(digests, default=0)
    kills = [strike for strike in strikes if strike.kind == "kill"]
    deadly = [strike for strike in strikes if strike.kind != "stop"]
    next_commits = [after for strike in kills for after in _next_commits(run, strike)]
    rejoins = [_first_after(run.metrics[str(s.replica_id)], s.time) for s in deadly]
    verdict = {
        "faults": len(strikes),
        "kinds": {kind: sum(s.kind == kind for s in strikes) for kind in dict.fromkeys(KINDS)},
        "commits": sum(len(lines) for lines in run.metrics.values()),
        "outer_steps": last,
        "outer_steps_with_different_digests": sum(len(held) > 1 for held in digests.values()),
        "outer_steps_lost": len(set(range(1, last + 1)) - digests.keys()) + _repeated(run),
        "inner_steps_lost_by_survivors": _lost_by_survivors(run, strikes),
        "seconds_from_kill_to_survivors_next_commit": _spread(next_commits),
        "seconds_to_rejoin": _spread([s for s in rejoins if s is not None]),
        "not_back": sum(seconds is None for seconds in rejoins),
        "final_digests_equal": len(set(run.digests.values())) == 1,
    }
    bad = (
        "outer_steps_with_different_digests",
        "outer_steps_lost",
        "inner_steps_lost_by_survivors",
        "not_back",
    )
    is_clean = verdict["final_digests_equal"] and not any(verdict[name] for name in bad)
    return verdict | {"is_clean": is_clean}


def _next_commits(run: Run, strike: Strike) -> list[float]:
    """For each survivor of a kill, how long after it the survivor committed."""
    survivors = [lines for id, lines in run.metrics.items() if id != str(strike.replica_id)]
    found = [_first_after(lines, strike.time) for lines in survivors]
    return [seconds for seconds in found if seconds is not None]


def _first_after(lines: list[dict[str, Any]], when: float) -> float | None:
    return next((line["time"] - when for line in lines if line["time"] > when), None)


def _repeated(run: Run) -> int:
    """Outer steps that a group has been through twice: it, or all, went back."""
    count = 0
    for lines in run.metrics.values():
        steps = [line["diloco/outer_step"] for line in lines]
        count += sum(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False))
    return count


def _lost_by_survivors(run: Run, strikes: list[Strike]) -> int:
    """Inner steps that groups threw away although nothing had been done to them.

    A group that was stopped for long has been left behind by the others: what it loses at its next
    commit is the fault's, not theirs.
    """
    lost = 0
    for replica_id, lines in run.metrics.items():
        own = [strike for strike in strikes if str(strike.replica_id) == replica_id]
        before = 0.0
        for line in lines:
            struck = any(before < s.time + s.seconds and s.time < line["time"] for s in own)
            lost += 0 if struck else int(line["diloco/steps_lost"])
            before = line["time"]
    return lost


def _spread(seconds: list[float]) -> Mapping[str, float]:
    if not seconds:
        return {}
    return {
        "median": round(statistics.median(seconds), 2),
        "max": round(max(seconds), 2),
        "count": len(seconds),
    }


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "-"
    return (
        {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )
