"""Runs replica groups on this machine: one alone, or n with a coordinator and a lighthouse.

It starts them, starts again those that die, and leaves no process behind.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from composer_replication.config_file import (
    ConfigError,
    diloco_section,
    model_section,
    read_diloco,
    save_config,
    with_values,
)
from composer_replication.group.run_folder import CONFIG, ReplicaFolder, make_run_folder
from composer_replication.launch.commands import CommandLine, Count, OptionalCount
from composer_replication.launch.coordinator_command import TOKEN_FILE, write_token_file
from composer_replication.launch.display import Display, LiveRun
from composer_replication.launch.job import (
    Job,
    check_command,
    check_launch,
    environment,
    group_command,
    group_environment,
    without_ranks,
)
from composer_replication.launch.outcome import (
    conclude,
    explain_failures,
    explain_interrupt,
    keep_page,
    recorder,
)
from composer_replication.launch.output import BAD_INPUT, FAILED, INTERRUPTED, print_error
from composer_replication.launch.processes import Interrupts, ReplicaGroups, ReplicaId
from composer_replication.launch.supervision import (
    FIRST_PAUSE_S,
    MAX_RESTARTS,
    START_RETRIES,
    SUPERVISED_HANG_TIMEOUT_S,
    Supervisor,
)
from composer_replication.options import (
    HANG_TIMEOUT,
    TOKEN,
    ReplicaEnv,
    ReplicaOptions,
    check_replica_id,
)
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S

log = logging.getLogger(__name__)

ENGINES = {
    "SLURM_ARRAY_TASK_ID": "an array job of Slurm",
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
    "TORCHX_REPLICA_IDX": "torchx",
}
"""Variables in which engines number what they start, and the engines."""

HEARTBEAT_TIMEOUT_MS = 2_000
"""Milliseconds of silence after which the lighthouse drops a group.

It is short, since no network on one machine loses packets.
"""

HangTimeout = Annotated[float, typer.Option(min=1.0, envvar=HANG_TIMEOUT)]


@dataclass(kw_only=True)
class LaunchOptions:
    """How ``launch`` keeps its groups running.

    A sync that does not wait for a late group any longer goes on without it. The group later loads
    the others' state, and loses its inner steps since its last sync. The callback's
    ``hang_timeout_s`` has precedence over this one.

    Args:
        replicas: Number of replica groups.
        max_restarts: Most restarts in a row of a group that dies.
        straggler_timeout_s: Longest wait of a sync for a group that is alive and late, in seconds.
        hang_timeout_s: A group ends itself after this time without progress, in seconds. If it is
            not given, COMPOSER_REPLICATION_HANG_TIMEOUT_S counts before the default.
    """

    replicas: Count = 2
    max_restarts: Annotated[int, typer.Option(min=0)] = MAX_RESTARTS
    straggler_timeout_s: Annotated[float, typer.Option(min=0.1)] = STRAGGLER_TIMEOUT_S
    hang_timeout_s: HangTimeout = SUPERVISED_HANG_TIMEOUT_S


def launch_groups(job: Job, options: LaunchOptions) -> int:
    """Train in several replica groups on this machine, and print the result.

    Args:
        job: What the groups run.
        options: How many there are, and when one of them is started again.

    Returns:
        An exit status: 0, 1 if the run failed, 2 if a group has rejected its input, 130 if the run
        was interrupted.

    Raises:
        ConfigError: The job cannot be launched. Nothing has been started or written.
        ValueError: The run's folder cannot be used. Nothing has been started.
    """
    replicas = options.replicas
    settings, group = check_launch(job, replicas)
    from composer_replication.coordinator.server import Coordinator

    run_dir, config = begin_run(job.config, job.name, job.source)
    began = time.monotonic()
    given = ReplicaEnv.from_env().tokens
    tokens = given or (secrets.token_hex(16),)
    coordinator = Coordinator(
        settings,
        job.source,
        num_replicas=replicas,
        min_replica_size=group.min_replica_size,
        digest_every=group.digest_every,
        state_dir=run_dir,
        bind="127.0.0.1:0",  # all groups are on this machine
        tokens=tokens,
        straggler_timeout_s=options.straggler_timeout_s,
        lighthouse_heartbeat_ms=HEARTBEAT_TIMEOUT_MS,
        all_start=True,
        model_section=model_section(config),
        record=recorder(run_dir),
    )
    # The display shows the groups. Log lines of the coordinator would be drawn over it.
    logging.getLogger("composer_replication.coordinator").setLevel(logging.WARNING)
    print(f"Page: {coordinator.address}/{token_hint(tokens[0], bool(given), run_dir)}")
    with Interrupts() as interrupts:
        interrupts.callback(coordinator.shutdown)
        groups = interrupts.enter_context(ReplicaGroups(run_dir, interrupts))

        def start(replica_id: int) -> None:
            # Without this a restarted group would be rejected as a duplicate until its
            # predecessor's heartbeats have timed out.
            coordinator.group_has_ended(replica_id)
            environ = environment(replica_id, replicas, job.nproc, coordinator)
            environ |= group_environment(replica_id, run_dir, options.hang_timeout_s)
            environ[TOKEN] = ",".join(tokens)
            command = group_command(job.command, job.nproc, run_dir, replica_id)
            groups.start(replica_id, command, environ)

        display = Display(Console(highlight=False), LiveRun(run_dir, range(replicas)))
        supervisor = Supervisor(
            groups,
            start,
            range(replicas),
            options.max_restarts,
            start_retries=min(START_RETRIES, options.max_restarts) if job.is_own else 0,
            start_timeout_s=group.start_timeout_s if job.is_own else math.inf,
            say=display.say,
        )
        for replica_id in range(replicas):
            start(replica_id)
        with display:
            failed = supervisor.watch()
        explain_failures(run_dir, failed, supervisor)
        if interrupts.count:
            print("Stopping the groups; Ctrl-C again kills them at once", flush=True)
    if not failed and not interrupts.count:
        return conclude(run_dir, supervisor, time.monotonic() - began)
    keep_page(run_dir)
    if failed:
        return BAD_INPUT if BAD_INPUT in failed.values() else FAILED
    explain_interrupt(run_dir, sys.argv[1:])
    return INTERRUPTED


def begin_run(config: Mapping[str, Any], name: str | Path, source: str | Path) -> tuple[Path, Any]:
    """Make a run's folder, write its config into it, and print where it is and its settings.

    Args:
        config: The config of the run.
        name: The file that it is from.
        source: Where its settings come from, for people.

    Returns:
        The folder, and the config with it as ``run_dir``.

    Raises:
        ValueError: The folder cannot be used, or a setting.
    """
    run_dir = make_run_folder(config, name)
    config = with_values(config, run_dir=str(run_dir))
    save_config(config, run_dir / CONFIG)
    settings, _ = read_diloco(diloco_section(config))
    print(f"Run folder: {run_dir}\nSettings from {source}: {settings}")
    return run_dir, config


def token_hint(token: str, is_from_env: bool, run_dir: Path) -> str:
    """What a user needs to open the page. A token that would end up in a log is not printed."""
    if is_from_env:
        return f"  (it asks for {TOKEN})"
    if sys.stdout.isatty():
        return f"#token={token}"
    write_token_file(run_dir / TOKEN_FILE, token)
    return f"  (it asks for the token in {run_dir / TOKEN_FILE})"


def run_group(
    command: CommandLine = None,
    *,
    restarts: Annotated[int, typer.Option(min=0)] = 10,
    backoff_s: Annotated[float, typer.Option("--backoff")] = FIRST_PAUSE_S,
    nproc: OptionalCount = None,
    hang_timeout_s: HangTimeout = SUPERVISED_HANG_TIMEOUT_S,
    run_dir: Path | None = None,
) -> int:
    """Run the command after -- as one replica group of a run, and start it again when it dies.

    What it prints goes where this process's own output goes. SIGTERM and Ctrl-C end the group.

    Args:
        command: The command line. ``{replica_id}`` and ``{run_dir}`` in it are replaced.
        restarts: Most restarts in a row without a sync.
        backoff_s: Seconds before the first restart; each in a row waits twice as long.
        nproc: Number of processes in the group. Default: as many as the command starts.
        hang_timeout_s: The group ends itself after this time without progress, in seconds. If it is
            not given, COMPOSER_REPLICATION_HANG_TIMEOUT_S counts before the default.
        run_dir: The run's folder. Default: COMPOSER_REPLICATION_RUN_DIR, else a temporary one.

    Returns:
        The exit status of the command's last end; 128 and the signal's number if one ended it, 130
        if this process was interrupted, 2 if the group was rejected, and 1 if the run has learned
        nothing.

    Raises:
        ConfigError: There is no such command, or the group has no id.
    """
    words = check_command(command)
    replica_id = replica_id_from(os.environ)
    with Interrupts() as interrupts:
        folder = run_dir or ReplicaEnv.from_env().run_dir
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="replica-group-")
            folder = interrupts.enter_context(made)
            log.warning(
                "No run folder is named, so the metrics are in %s and vanish at the end: use "
                "--run-dir or COMPOSER_REPLICATION_RUN_DIR",
                folder,
            )
        folder = Path(folder).absolute()
        # It may have the status of an earlier process.
        ReplicaFolder(folder, replica_id).enter("starting")
        groups = ReplicaGroups(folder, interrupts, keeps_logs=False)
        interrupts.enter_context(groups)
        # A command that starts its own ranks may need what an engine says about its nodes.
        inherited = dict(os.environ) if nproc in (None, 1) else without_ranks(os.environ)
        variables = inherited | group_environment(replica_id, folder, hang_timeout_s)

        def start(replica_id: ReplicaId) -> None:
            groups.start(replica_id, group_command(words, nproc, folder, replica_id), variables)

        supervisor = Supervisor(
            groups,
            start,
            [replica_id],
            restarts,
            start_retries=sys.maxsize,  # the coordinator may not be there yet
            first_pause_s=backoff_s,
            start_timeout_s=ReplicaOptions().start_timeout_s,
            say=log.warning,
        )
        start(replica_id)
        failed = supervisor.watch()
    status = failed.get(replica_id, INTERRUPTED if interrupts.count else 0)
    if not status and (failure := supervisor.run.failure):
        print_error(f"Error: {failure}")
        return FAILED
    return 128 - status if status < 0 else status


def replica_id_from(environ: Mapping[str, str]) -> str:
    """Return this group's id: ``REPLICA_GROUP_ID``, else the number that an engine has given it.

    Args:
        environ: The environment.

    Raises:
        ConfigError: None is set, or two engines' numbers differ.
        ValueError: The id cannot be a group's name.
    """
    found = {name: environ[name] for name in ENGINES if environ.get(name)}
    own = environ.get("REPLICA_GROUP_ID")
    numbers = {own} if own else {*found.values()}
    if not numbers:
        engines = ", ".join(f"{name} of {engine}" for name, engine in ENGINES.items())
        raise ConfigError(
            "which replica group is this? Set REPLICA_GROUP_ID to 0, 1, ..., different in each "
            f"group. Without it one of these is taken, and none is set: {engines}"
        )
    replica_id = numbers.pop()
    if numbers:
        each = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ConfigError(f"{each}: which of them is the replica group? Set REPLICA_GROUP_ID")
    check_replica_id(replica_id)
    return replica_id
