"""The command line and the environment of one replica group on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from composer_replication.callback.run_folder import CONFIG, log_path
from composer_replication.coordinator.server import Coordinator
from composer_replication.replica.options import HOSTNAME

Command = Callable[[Path, int], list[str]]
"""Returns the command line of a replica group, by the run's folder and the group's id."""

HANG_TIMEOUT = "COMPOSER_REPLICATION_HANG_TIMEOUT_S"
"""The environment variable that holds a group's ``hang_timeout_s``."""

# Set by torchrun or Composer's launcher.
_RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK BASE_RANK MASTER_ADDR MASTER_PORT"
).split()


def train_command(nproc: int | None, run_dir: Path, replica_id: str | int) -> list[str]:
    """The command line that trains a replica group from the config in the run's folder.

    Args:
        nproc: Processes in the group.
        run_dir: The run's folder.
        replica_id: The group's id.
    """
    command = [sys.executable, "-m", "composer_replication", "train", str(run_dir / CONFIG)]
    return per_rank(command, nproc, log_path(run_dir, replica_id).parent)


def per_rank(command: list[str], nproc: int | None, folder: Path) -> list[str]:
    """Return the command line that runs a command once for each rank of a group.

    Args:
        command: The command.
        nproc: Ranks of the group. With more than one, Composer's launcher starts them. None: the
            command starts them itself, or there is only one.
        folder: For the output of all ranks but the first.
    """
    if nproc in (None, 1):
        return command
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # Composer's launcher forwards the output of rank 0. Without a file, that of the other ranks
    # would be lost.
    other_ranks = str(folder).replace("{", "{{").replace("}", "}}") + "/log_rank{rank}.txt"
    return [
        *(sys.executable, "-m", "composer.cli.launcher"),
        *("--nproc", str(nproc), "--master_port", str(port)),
        *("--stdout", other_ranks, "--stderr", other_ranks),
        *("--command_mode", *command),
    ]


def group_environment(
    replica_id: str | int, run_dir: Path, hang_timeout_s: float
) -> dict[str, str]:
    """The environment variables that a replica group needs on any machine.

    Args:
        replica_id: The group's id.
        run_dir: The run's folder.
        hang_timeout_s: Seconds without progress after which the group ends itself.
    """
    return {
        "REPLICA_GROUP_ID": str(replica_id),
        "COMPOSER_REPLICATION_RUN_DIR": str(run_dir),
        HANG_TIMEOUT: f"{hang_timeout_s:g}",
        "PYTHONUNBUFFERED": "1",
    }


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the ranks of another job, which a group would take for its own."""
    return {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}


def environment(
    replica_id: int, replicas: int, nproc: int | None, coordinator: Coordinator
) -> dict[str, str]:
    """The environment variables of one of several replica groups on this machine.

    Args:
        replica_id: The group's id.
        replicas: Number of groups.
        nproc: Processes in each group. None: nobody knows, and each has an equal share of the GPUs.
        coordinator: The run's coordinator.
    """
    environ = without_ranks(os.environ) | {
        "NUM_REPLICA_GROUPS": str(replicas),
        "TORCHFT_LIGHTHOUSE": coordinator.lighthouse_addr,
        "COMPOSER_REPLICATION_COORDINATOR": coordinator.address,
    }
    environ.setdefault(HOSTNAME, "127.0.0.1")  # all groups are here: no other machine may connect
    processes = replicas * (nproc or 1)
    if processes > 1:
        # By default torch uses every core in each process, which makes all of them several times
        # slower.
        cores = len(os.sched_getaffinity(0))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    gpus = visible_gpus()
    each = nproc or len(gpus) // replicas
    if each and len(gpus) >= replicas * each:
        own = gpus[replica_id * each : (replica_id + 1) * each]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environ


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
