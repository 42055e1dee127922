"""The command ``run``: one replica group on this machine, started again when it dies."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from composer_replication.group.run_folder import log_path
from composer_replication.launch.job import (
    check_command,
    group_command,
    group_environment,
    without_ranks,
)
from composer_replication.launch.output import INTERRUPTED
from composer_replication.launch.processes import Interrupts, ReplicaGroups, ReplicaId
from composer_replication.launch.run_record import Run
from composer_replication.launch.supervision import Supervisor
from composer_replication.options import ReplicaEnv, ReplicaOptions, check_replica_id
from composer_replication.training.config import ConfigError

log = logging.getLogger(__name__)

ENGINES = {
    "SLURM_ARRAY_TASK_ID": "an array job of Slurm",
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
    "TORCHX_REPLICA_IDX": "torchx",
}
"""Variables in which engines number what they start, and the engines."""


def run_group(
    command: Sequence[str],
    *,
    restarts: int,
    backoff_s: float,
    nproc: int | None = None,
    hang_timeout_s: float,
    run_dir: Path | None = None,
) -> int:
    """Run a command as one replica group, and start it again when it dies.

    What it prints goes where this process's own output goes. SIGTERM and Ctrl-C end the group.

    Args:
        command: The command line. ``{replica_id}`` and ``{run_dir}`` in it are replaced.
        restarts: Most restarts in a row without a sync.
        backoff_s: Seconds before the first restart; each in a row waits twice as long.
        nproc: See ``command_job``.
        hang_timeout_s: Seconds without progress after which the group ends itself, to be started
            again.
        run_dir: The run's folder. None: that of the environment, else a temporary one.

    Returns:
        The exit status of the command's last end; 128 and the signal's number if one ended it, and
        130 if this process was interrupted.

    Raises:
        ConfigError: There is no such command, or the group has no id.
    """
    check_command(command)
    environ = ReplicaEnv.from_env()
    replica_id = replica_id_from(os.environ)
    with ExitStack() as opened:
        folder = run_dir or environ.run_dir
        if folder is None:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="replica-group-"))
            log.warning(
                "No run folder is named, so the metrics are in %s and vanish at the end: use "
                "--run-dir or COMPOSER_REPLICATION_RUN_DIR",
                folder,
            )
        folder = Path(folder).absolute()
        log_path(folder, replica_id).parent.mkdir(parents=True, exist_ok=True)
        interrupts = opened.enter_context(Interrupts())
        groups = opened.enter_context(ReplicaGroups(folder, interrupts, forwards=True))
        # A command that starts its own ranks may need what an engine says about its nodes.
        inherited = dict(os.environ) if nproc in (None, 1) else without_ranks(os.environ)
        variables = inherited | group_environment(replica_id, folder, hang_timeout_s)

        def start(replica_id: ReplicaId) -> None:
            groups.start(replica_id, group_command(command, nproc, folder, replica_id), variables)

        supervisor = Supervisor(
            groups,
            Run(folder, [replica_id]),
            start,
            [replica_id],
            restarts,
            start_retries=sys.maxsize,  # the coordinator may not be there yet
            first_pause_s=backoff_s,
            start_timeout_s=ReplicaOptions.start_timeout_s,
        )
        supervisor.begin(replica_id)  # the folder may have the status of an earlier process
        start(replica_id)
        record = supervisor.records[replica_id]

        def show() -> None:
            # After a death its own errors say more.
            if not record.deaths and (text := supervisor.late_start()):
                log.warning("%s", text)
            for line in supervisor.new_ends():
                log.warning("Replica group %s", line.removeprefix("group "))

        failed = supervisor.watch(show)
        show()
    status = failed.get(replica_id, INTERRUPTED if interrupts.count else 0)
    return 128 - status if status < 0 else status


def replica_id_from(environ: Mapping[str, str]) -> str:
    """Return this group's id: ``REPLICA_GROUP_ID``, else the number that an engine has given it.

    Args:
        environ: The environment.

    Raises:
        ConfigError: None is set, or two engines' numbers differ.
        ValueError: The id cannot be a group's name.
    """
    own = environ.get("REPLICA_GROUP_ID")
    found = {name: environ[name] for name in ENGINES if environ.get(name)}
    if not own and not found:
        engines = ", ".join(f"{name} of {engine}" for name, engine in ENGINES.items())
        raise ConfigError(
            "which replica group is this? Set REPLICA_GROUP_ID to 0, 1, ..., different in each "
            f"group. Without it one of these is taken, and none is set: {engines}"
        )
    if not own and len(set(found.values())) > 1:
        each = ", ".join(f"{name}={value}" for name, value in found.items())
        raise ConfigError(f"{each}: which of them is the replica group? Set REPLICA_GROUP_ID")
    replica_id = own or next(iter(found.values()))
    check_replica_id(replica_id)
    return replica_id
