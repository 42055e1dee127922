"""Trains under injected faults and measures what they cost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from composer_replication.config_file import ConfigError, with_values
from composer_replication.group.run_folder import make_run_folder
from composer_replication.launch.job import Job
from composer_replication.launch.launcher import LaunchOptions, launch_groups
from composer_replication.launch.run_record import open_run
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S

from .at_start.fault_injection import unreliable
from .history import History
from .injector import HANG_ENDS_S, KINDS, RECOVERY_S, RandomFaultInjector, plan_faults
from .slow_groups import read_speeds

MAX_RESTARTS = 1000

ENDLESS = "1000000000ba"
"""How long a config trains: until the file ``STOP`` in the run's folder ends it."""


def run_chaos(
    job: Job,
    *,
    replicas: int,
    faults_per_minute: float,
    duration_s: float,
    seed: int,
    kinds: Sequence[str] | None = None,
    slow: Sequence[str] = (),
    straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
    recovery_s: float = RECOVERY_S,
) -> int:
    """Launch a job under faults for some time, write ``chaos.json`` and print a table.

    Args:
        job: What the groups run. A config trains for ``duration_s`` instead of ``max_duration``, at
            a constant learning rate. Digests are compared at every outer step.
        replicas: Number of replica groups, 2 or more.
        faults_per_minute: Mean number of faults in a minute.
        duration_s: Length of the training, in seconds.
        seed: Seed of the kinds, victims and times of the faults.
        kinds: Kinds of faults to inject. None: all of ``KINDS``.
        slow: Groups that are slow all the time: such as ``2:0.5``, group 2 at half speed.
        straggler_timeout_s: As in ``LaunchOptions``.
        recovery_s: Seconds between the end of the last fault and the end of the run.

    Returns:
        An exit status: 0 if nothing was lost and no group diverged, else 1.

    Raises:
        ConfigError: There are fewer than two groups, a kind does not exist, or ``slow`` is wrong.
    """
    if replicas < 2:
        raise ConfigError(f"--replicas {replicas}: use 2 or more, since one has to survive")
    kinds = KINDS if kinds is None else kinds
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(f"--kinds {','.join(kinds)}: use some of {','.join(KINDS)}")
    speeds = read_speeds(slow, replicas)
    config = with_values(endless(job.config), callbacks={"diloco": {"digest_every": 1}})
    run_dir = make_run_folder(config, job.name)
    config = with_values(config, run_dir=str(run_dir))
    repeat = {"seed": seed, "kinds": list(kinds), "faults_per_minute": faults_per_minute}
    repeat |= {"replicas": replicas, "slow": speeds}
    repeat |= {"straggler_timeout_s": straggler_timeout_s}
    history = History(run_dir, replicas, repeat | {"duration_s": duration_s})
    planned = plan_faults(seed, kinds, replicas)
    injector = RandomFaultInjector(
        history, planned, faults_per_minute, duration_s, speeds, recovery_s
    )
    with patch.dict(os.environ, unreliable(os.environ)):  # the groups inherit it
        status = launch_groups(
            replace(job, config=config),
            LaunchOptions(
                replicas=replicas,
                max_restarts=MAX_RESTARTS,
                straggler_timeout_s=straggler_timeout_s,
                hang_timeout_s=HANG_ENDS_S,
            ),
            on_poll=injector,
            make_coordinator=injector.make_coordinator,
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
