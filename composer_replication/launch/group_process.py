"""What one replica group of a launch runs, and in which environment."""

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
"""The command line of a replica group, by its id."""

HANG_TIMEOUT = "COMPOSER_REPLICATION_HANG_TIMEOUT_S"
"""Names the environment variable with a group's ``hang_timeout_s``."""

# What torchrun or Composer's launcher sets; a group must not take its place in theirs for its own.
_PLACE_IN_A_JOB = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK BASE_RANK MASTER_ADDR MASTER_PORT"
).split()


def train_command(
    run_dir: Path, nproc: int, replica_id: int, module: str = "composer_replication"
) -> list[str]:
    """The command of a replica group: of one process, or of several under Composer's launcher."""
    train = [module, "train", str(run_dir / CONFIG)]
    if nproc == 1:
        return [sys.executable, "-m", *train]
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # Composer's launcher passes rank 0's output on; without a file the others' would be dropped.
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
    """The environment of a replica group, with its place in the run."""
    environ = {name: value for name, value in os.environ.items() if name not in _PLACE_IN_A_JOB}
    environ |= {
        "REPLICA_GROUP_ID": str(replica_id),
        "NUM_REPLICA_GROUPS": str(replicas),
        "TORCHFT_LIGHTHOUSE": coordinator.lighthouse_addr,
        "COMPOSER_REPLICATION_COORDINATOR": coordinator.address,
        "COMPOSER_REPLICATION_RUN_DIR": str(run_dir),
        "PYTHONUNBUFFERED": "1",
    }
    environ.setdefault(HOSTNAME, "127.0.0.1")  # all groups are here: let nobody else reach them
    processes = replicas * nproc
    if processes > 1:
        # Torch takes every core in each process, and they slow each other down several times.
        cores = len(os.sched_getaffinity(0))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    gpus = visible_gpus()
    if len(gpus) >= processes:
        own = gpus[replica_id * nproc : (replica_id + 1) * nproc]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environ


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
