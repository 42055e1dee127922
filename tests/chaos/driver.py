"""Trains under injected faults and measures what they cost."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any
from unittest.mock import patch

import typer
from rich.console import Console
from rich.table import Table

from composer_replication.config_file import ConfigError, with_values
from composer_replication.coordinator import server
from composer_replication.group.run_folder import make_run_folder
from composer_replication.launch.commands import Count, JobOptions
from composer_replication.launch.job import Job
from composer_replication.launch.launcher import LaunchOptions, launch_groups
from composer_replication.launch.run_record import open_run
from composer_replication.launch.supervision import Supervisor
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S

from .at_start.fault_injection import unreliable
from .history import History
from .injector import HANG_ENDS_S, KINDS, RECOVERY_S, RandomFaultInjector, plan_faults
from .slow_groups import read_speeds

MAX_RESTARTS = 1000

ENDLESS = "1000000000ba"
"""How long a config trains: until the file ``STOP`` in the run's folder ends it."""


@dataclass(kw_only=True)
class ChaosOptions(JobOptions):
    """How long to train, and under which faults.

    Args:
        replicas: Number of replica groups.
        faults_per_minute: Mean number of faults in a minute.
        duration: Length of the training, in seconds.
        seed: Seed of kinds, victims and times of the faults.
        kinds: Kinds of faults, separated by commas.
        slow: A group that is slow all the time, such as 2:0.5; can be repeated.
        straggler_timeout_s: Longest wait of a sync for a group that is alive and late, in seconds.
        recovery_s: Seconds without new faults at the end, for groups to recover.
    """

    replicas: Count = 3
    faults_per_minute: Annotated[float, typer.Option(min=0.1)] = 2.0
    duration: Annotated[float, typer.Option(min=10.0)] = 600.0
    seed: int = 0
    kinds: str = ",".join(KINDS)
    slow: Annotated[list[str] | None, typer.Option(metavar="GROUP:SPEED")] = None
    straggler_timeout_s: Annotated[float, typer.Option(min=0.1)] = STRAGGLER_TIMEOUT_S
    recovery_s: float = RECOVERY_S


def run_chaos(job: Job, options: ChaosOptions) -> int:
    """Launch a job under faults for some time, write ``chaos.json`` and print a table.

    Args:
        job: What the groups run. A config trains for ``duration`` instead of ``max_duration``, at
            a constant learning rate. Digests are compared at every outer step.
        options: All but the job.

    Returns:
        An exit status: 0 if nothing was lost and no group diverged, else 1.

    Raises:
        ConfigError: There are fewer than two groups, a kind does not exist, or ``slow`` is wrong.
    """
    replicas, duration_s = options.replicas, options.duration
    if replicas < 2:
        raise ConfigError(f"--replicas {replicas}: use 2 or more, since one has to survive")
    kinds = options.kinds.split(",")
    if not {*kinds} <= {*KINDS}:
        raise ConfigError(f"--kinds {options.kinds}: use some of {','.join(KINDS)}")
    speeds = read_speeds(options.slow or (), replicas)
    config = with_values(endless(job.config), callbacks={"diloco": {"digest_every": 1}})
    run_dir = make_run_folder(config, job.name)
    config = with_values(config, run_dir=str(run_dir))
    repeat = {"seed": options.seed, "kinds": kinds, "replicas": replicas, "slow": speeds}
    repeat |= {"faults_per_minute": options.faults_per_minute, "duration_s": duration_s}
    repeat |= {"straggler_timeout_s": options.straggler_timeout_s}
    history = History(run_dir, replicas, repeat)
    planned = plan_faults(options.seed, kinds, replicas)
    injector = RandomFaultInjector(
        history, planned, options.faults_per_minute, duration_s, speeds, options.recovery_s
    )
    watch = Supervisor.watch
    with (
        patch.dict(os.environ, unreliable(os.environ)),  # the groups inherit it
        patch.object(Supervisor, "watch", lambda supervisor: watch(supervisor, injector)),
        patch.object(server, "Coordinator", injector.make_coordinator),
    ):
        status = launch_groups(
            replace(job, config=config),
            LaunchOptions(
                replicas=replicas,
                max_restarts=MAX_RESTARTS,
                straggler_timeout_s=options.straggler_timeout_s,
                hang_timeout_s=HANG_ENDS_S,
            ),
        )
    injector.finish()
    verdict = history.verdict(open_run(run_dir).digests)
    history.write(verdict)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in verdict.items():
        table.add_row(name.replace("_", " "), _in_words(value))
    for violation in history.violations:
        table.add_row("violation", f"after {violation['at']:g} s: {violation['what']}")
    console = Console(highlight=False)
    console.print(table)
    if not status and history.now() < duration_s:
        console.print(
            f"The groups had finished after {history.now():.0f} of {duration_s:.0f} s, so later "
            "faults did not come: let the command train for longer",
            style="red",
        )
    return status or int(not verdict["is_clean"])


def endless(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config that trains until somebody ends it, at a constant learning rate.

    How long a command trains is in the command, so nothing changes there.
    """
    if "max_duration" not in config:
        return config
    # A run without an end has no schedule.
    return with_values(config, max_duration=ENDLESS, eval_interval="1ep", schedulers=None)


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Mapping):
        return str(value)
    if any(isinstance(each, Mapping) for each in value.values()):  # by kind, a line for each
        return "\n".join(f"{name}: {_in_words(each)}" for name, each in value.items()) or "-"
    return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "-"
