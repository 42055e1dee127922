"""The command and the environment of one replica group of a launch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from composer_replication.callback.run_folder import CONFIG, log_path
from composer_replication.coordinator.server import Coordinator
from composer_replication.replica.options import HOSTNAME

Command = Callable[[int], list[str]]
"""Returns the command line of a replica group, by its id."""

HANG_TIMEOUT = "COMPOSER_REPLICATION_HANG_TIMEOUT_S"
"""The environment variable that holds a group's ``hang_timeout_s``."""

# Set by torchrun or Composer's launcher. A group that inherited them would take the ranks of the
# launcher's job for its own.
_RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK BASE_RANK MASTER_ADDR MASTER_PORT"
).split()


def train_command(
    run_dir: Path, nproc: int, replica_id: int, module: str = "composer_replication"
) -> list[str]:
    """The command line that trains a replica group.

    Args:
        run_dir: The run's folder.
        nproc: Processes in the group. With more than one, Composer's launcher starts them.
        replica_id: The group's id.
        module: The module that is run.
    """
    train = [module, "train", str(run_dir / CONFIG)]
    if nproc == 1:
        return [sys.executable, "-m", *train]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # Composer's launcher forwards the output of rank 0. Without a file, that of the other ranks
    # would be lost.
    folder = str(log_path(run_dir, replica_id).parent).replace("{", "{{").replace("}", "}}")
    other_ranks = folder + "/log_rank{rank}.txt"
    return [
        *(sys.executable, "-m", "composer.cli.launcher"),
        *("--nproc", str(nproc), "--master_port", str(port)),
        *("--stdout", other_ranks, "--stderr", other_ranks),
        *("--module_mode", *train),
    ]


def environment(
    replica_id: int, replicas: int, nproc: int, coordinator: Coordinator, run_dir: Path
) -> dict[str, str]:
    """The environment variables of a replica group.

    Args:
        replica_id: The group's id.
        replicas: Number of groups.
        nproc: Processes in each group.
        coordinator: The run's coordinator.
        run_dir: The run's folder.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    environ |= {
        "REPLICA_GROUP_ID": str(replica_id),
        "NUM_REPLICA_GROUPS": str(replicas),
        "TORCHFT_LIGHTHOUSE": coordinator.lighthouse_addr,
        "COMPOSER_REPLICATION_COORDINATOR": coordinator.address,
        "COMPOSER_REPLICATION_RUN_DIR": str(run_dir),
        "PYTHONUNBUFFERED": "1",
    }
    environ.setdefault(HOSTNAME, "127.0.0.1")  # all groups are here: no other machine may connect
    processes = replicas * nproc
    if processes > 1:
        # By default torch uses every core in each process, which makes all of them several times
        # slower.
        cores = len(os.sched_getaffinity(0))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    gpus = visible_gpus()
    if len(gpus) >= processes:
        own = gpus[replica_id * nproc : (replica_id + 1) * nproc]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environ


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
