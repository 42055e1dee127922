"""Train under faults of all kinds, and tell what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from composer_replication.callback.run_folder import make_run_folder
from composer_replication.launch.chaos_history import History
from composer_replication.launch.chaos_saboteur import HANG_TIMEOUT_S, KINDS, Saboteur, plan
from composer_replication.launch.group_process import train_command
from composer_replication.launch.launcher import launch
from composer_replication.launch.run_record import read_run
from composer_replication.training.config import ConfigError

ENDLESS = "1000000000ba"
MAX_RESTARTS = 1000


def chaos(
    config: dict[str, Any],
    config_path: str | Path,
    *,
    replicas: int,
    nproc: int,
    faults_per_minute: float,
    duration_s: float,
    seed: int,
    kinds: Sequence[str] | None = None,
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
        kinds: Which of ``KINDS``; None: all.

    Returns:
        An exit status: 0 if nothing was lost and nobody diverged.

    Raises:
        ConfigError: There are too few groups, or there is no such kind.
    """
    if replicas < 2:
        raise ConfigError(f"--replicas {replicas}: chaos needs 2 or more, one has to survive")
    kinds = KINDS if kinds is None else kinds
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ConfigError(f"--kinds {','.join(kinds)}: use some of {','.join(KINDS)}")
    callbacks = dict(config.get("callbacks") or {})
    callbacks["diloco"] = dict(callbacks.get("diloco") or {}) | {"digest_every": 1}
    config = config | {"callbacks": callbacks, "max_duration": ENDLESS}
    config.pop("eval_interval", None)
    config.pop("scheduler", None)  # it has no end to go to
    run_dir = make_run_folder(config, config_path)
    config["run_dir"] = str(run_dir)
    repeat = {"seed": seed, "kinds": list(kinds), "faults_per_minute": faults_per_minute}
    history = History(run_dir, replicas, repeat | {"duration_s": duration_s})
    saboteur = Saboteur(history, plan(seed, kinds, replicas), faults_per_minute, duration_s)
    status = launch(
        config,
        config_path,
        replicas=replicas,
        nproc=nproc,
        max_restarts=MAX_RESTARTS,
        hang_timeout_s=HANG_TIMEOUT_S,
        saboteur=saboteur,
        command=partial(train_command, run_dir, nproc, module=f"{__package__}.fault_injection"),
        make_coordinator=saboteur.make_coordinator,
    )
    saboteur.finish()
    verdict = history.verdict(read_run(run_dir).digests)
    history.write(verdict)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in verdict.items():
        table.add_row(name.replace("_", " "), _in_words(value))
    for violation in history.violations:
        table.add_row("violation", f"after {violation['at']:g} s: {violation['what']}")
    Console(highlight=False).print(table)
    return status or int(not verdict["is_clean"])


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Mapping):
        return str(value)
    if any(isinstance(each, Mapping) for each in value.values()):  # by kind, a line for each
        return "\n".join(f"{name}: {_in_words(each)}" for name, each in value.items()) or "-"
    return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "-"
