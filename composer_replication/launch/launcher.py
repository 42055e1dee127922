"""Run n replica groups and their lighthouse on this machine: all of them, or none."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_replication.callback.run_folder import (
    CONFIG,
    METRICS,
    RESULT,
    log_path,
    make_run_folder,
)
from composer_replication.coordinator.http_service import TlsFiles
from composer_replication.coordinator.server import Coordinator
from composer_replication.launch.coordinator_command import settings_of, tls_dir_of
from composer_replication.launch.display import Display
from composer_replication.launch.errors import FAILED, INTERRUPTED
from composer_replication.launch.group_process import (
    HANG_TIMEOUT,
    Command,
    environment,
    train_command,
)
from composer_replication.launch.processes import Interrupts, ReplicaGroups
from composer_replication.launch.report import write_report
from composer_replication.launch.run_record import (
    count,
    describe,
    duration,
    last_lines,
    read_run,
    write_summary,
)
from composer_replication.launch.run_token import TOKEN_FILE, write_token_file
from composer_replication.launch.supervision import (
    HANG_TIMEOUT_S,
    MAX_RESTARTS,
    Saboteur,
    Supervisor,
)
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.options import TOKEN, ReplicaEnv, ReplicaOptions
from composer_replication.training.config import ConfigError, save_config

_LOCAL = "127.0.0.1"
"""Where the coordinator listens: the groups are on this machine."""

HEARTBEAT_TIMEOUT_MS = 2_000
"""After how long a silent group is gone: short, since on one machine no network loses packets."""


def launch(
    config: dict[str, Any],
    config_path: str | Path,
    *,
    replicas: int,
    nproc: int = 1,
    max_restarts: int = MAX_RESTARTS,
    straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
    hang_timeout_s: float = HANG_TIMEOUT_S,
    saboteur: Saboteur | None = None,
    command: Command | None = None,
    make_coordinator: Callable[..., Any] = Coordinator,
) -> int:
    """Train a config in several replica groups on this machine, and say what came of it.

    Args:
        config: From ``load_config``.
        config_path: Where it was read: it names the run's folder unless ``run_dir`` does.
        replicas: Replica groups.
        nproc: Processes in each, one a GPU.
        max_restarts: How often in a row a group that dies is started again.
        straggler_timeout_s: How long a sync waits for a group that is alive and not there yet. It
            then goes on without it, and that group takes over the others' state, losing its steps.
        hang_timeout_s: After how long without any progress a group ends itself, to be started
            again; unless the config names another ``hang_timeout_s``.
        saboteur: Does harm on purpose.
        command: What a group runs, by its id. None: ``composer-replication train``.
        make_coordinator: ``Coordinator``, or what stands in for it.

    Returns:
        An exit status: 0, 1 if the run failed, 130 if it was interrupted.

    Raises:
        ConfigError: The config cannot be run like this. Nothing has been started or written.
        ValueError: Nor has it if the run's folder cannot be used.
    """
    check_launch(config, replicas, nproc)
    tls = TlsFiles.of_folder(tls_dir_of(config))
    run_dir = make_run_folder(config, config_path)
    config = config | {"run_dir": str(run_dir)}
    save_config(config, run_dir / CONFIG)
    command = command or partial(train_command, run_dir, nproc)
    console = Console(highlight=False)
    console.print(f"Run folder: {run_dir}", markup=False, soft_wrap=True)
    began = time.monotonic()
    given = ReplicaEnv.from_env().tokens
    tokens = given or (secrets.token_hex(16),)
    coordinator = make_coordinator(
        settings_of(config),
        str(config_path),
        num_replicas=replicas,
        min_replicas=_section(config).get("min_replica_size", ReplicaOptions.min_replica_size),
        state_dir=run_dir,
        bind=f"{_LOCAL}:0",
        tls=tls,
        tokens=tokens,
        straggler_timeout_s=straggler_timeout_s,
        lighthouse_heartbeat_ms=HEARTBEAT_TIMEOUT_MS,
        all_start=True,
        model_section=config.get("model"),
    )
    # The display tells people; the coordinator's own words would be drawn over it.
    logging.getLogger("composer_replication.coordinator").setLevel(logging.WARNING)
    logging.getLogger("composer_replication.replica.audit").setLevel(logging.WARNING)
    page = f"Page: {coordinator.address}/" + _token_hint(tokens[0], bool(given), run_dir)
    console.print(page, markup=False, soft_wrap=True)
    with Interrupts() as interrupts:
        try:
            with ReplicaGroups(run_dir, interrupts) as groups:

                def start(replica_id: int) -> None:
                    coordinator.group_has_ended(replica_id)  # if there was one before
                    place = environment(replica_id, replicas, nproc, coordinator, run_dir)
                    place |= {TOKEN: ",".join(tokens), HANG_TIMEOUT: f"{hang_timeout_s:g}"}
                    groups.start(replica_id, command(replica_id), place)

                supervisor = Supervisor(groups, run_dir, start, replicas, max_restarts, interrupts)
                for replica_id in range(replicas):
                    start(replica_id)
                seconds_left = None if saboteur is None else saboteur.seconds_left
                display = Display(console, run_dir, replicas, seconds_left)
                failed = watch(supervisor, display, saboteur)
                for replica_id, status in failed.items():
                    _explain_failure(run_dir, replica_id, status)
                if interrupts.count:
                    console.print("Stopping the groups; Ctrl-C again kills them at once")
        finally:
            coordinator.shutdown()
    if failed or interrupts.count:
        return FAILED if failed else INTERRUPTED
    not_back = [id for id, record in supervisor.records.items() if record.is_given_up]
    if not_back:
        _print_error(
            f"Replica groups {', '.join(map(str, not_back))} died when the others were finishing, "
            "and were not back in time. The others' global parameters are complete"
        )
    left_out = {id: r.deaths[-1] for id, r in supervisor.records.items() if r.is_left_out}
    present = [id for id in range(replicas) if id not in not_back and id not in left_out]
    status = finish(run_dir, present, time.monotonic() - began, supervisor.restarts)
    for replica_id, exit_status in left_out.items():
        _explain_failure(run_dir, replica_id, exit_status, "the others went on without it")
    return FAILED if left_out else status


def check_launch(config: dict[str, Any], replicas: int, nproc: int) -> None:
    """Refuse what cannot run as several groups on one machine."""
    if replicas < 1 or nproc < 1:
        raise ConfigError(f"--replicas {replicas} --nproc {nproc}: use 1 or more of each")
    section = _section(config)
    for key, fix in (
        ("replica_id", "launch numbers the groups"),
        ("coordinator_addr", "launch brings its own"),
        ("lighthouse_addr", "launch brings its own lighthouse; `train` joins another"),
        ("run_dir", "set run_dir at the top of the config"),
    ):
        if section.get(key) is not None:
            raise ConfigError(f"callbacks.diloco.{key}={section[key]!r}: leave it out, {fix}")
    if section.get("num_replicas") not in (None, replicas):
        raise ConfigError(
            f"callbacks.diloco.num_replicas={section['num_replicas']} but --replicas {replicas}: "
            "leave num_replicas out"
        )
    if section.get("min_replica_size", 1) > replicas:
        raise ConfigError(
            f"callbacks.diloco.min_replica_size={section['min_replica_size']} is above --replicas "
            f"{replicas}: no sync could ever commit. Use at most {replicas}"
        )


def _token_hint(token: str, is_given: bool, run_dir: Path) -> str:
    """How people tell the page the token; one that would stay in a log is not printed."""
    if is_given:
        return f"  (it asks for {TOKEN})"
    if sys.stdout.isatty():
        return f"#token={token}"
    write_token_file(run_dir / TOKEN_FILE, token)
    return f"  (it asks for what is in {run_dir / TOKEN_FILE})"


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return (config.get("callbacks") or {}).get("diloco") or {}


def watch(
    supervisor: Supervisor, display: Display, saboteur: Saboteur | None = None
) -> dict[int, int]:
    """Show the groups until the supervisor has seen their end.

    Returns:
        The exit statuses of those that failed.
    """

    def show(statuses: dict[int, int | None], is_last: bool) -> None:
        display.refresh(statuses, is_last=is_last)
        if saboteur is not None and not is_last:
            saboteur(supervisor)

    with display:
        return supervisor.watch(show)


def finish(
    run_dir: Path, present: Sequence[int], seconds: float, restarts: Mapping[str, int]
) -> int:
    """Write the summary and the picture, and say what came out.

    Args:
        run_dir: The run's folder.
        present: The groups that were there at the end.
        seconds: How long it took.
        restarts: How often each group was started again, by its name.

    Returns:
        An exit status: 1 if a result is missing, or the groups ended with different parameters.
    """
    run = read_run(run_dir)
    silent = [id for id in present if str(id) not in run.results]
    if silent:
        _print_error(f"{log_path(run_dir, silent[0]).parent}/{RESULT} is missing")
        _explain_failure(run_dir, silent[0], 0)
        return FAILED
    write_summary(run, restarts)
    try:
        picture = write_report(run_dir)
    except ValueError as error:
        _print_error(str(error))
        return FAILED
    rows = describe(run)
    if any(restarts.values()):
        each = ", ".join(f"group {id} {count(n, 'time')}" for id, n in restarts.items() if n)
        rows.append(("started again", each))
    rows += [("time", duration(seconds)), ("picture", str(picture))]
    for name, value in [*rows, ("all files", str(run_dir))]:
        print(f"{name:<24}{value}")
    if len(set(run.digests.values())) > 1:
        _print_error(
            "The groups ended with different global parameters, so their last syncs were not the "
            f"same ones: compare diloco/num_participants at the end of replica_<id>/{METRICS}"
        )
        return FAILED
    return 0


def _explain_failure(
    run_dir: Path, replica_id: int, status: int, then: str = "the run is stopped"
) -> None:
    how = f"ended with exit status {status}"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    path = log_path(run_dir, replica_id)
    _print_error(f"Replica group {replica_id} {how}, so {then}. {path} ends with:")
    _print_error("\n".join(f"  {line}" for line in last_lines(path)) or "  (nothing)")


def _print_error(text: str) -> None:
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
