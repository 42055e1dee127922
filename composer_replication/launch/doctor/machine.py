"""Checks of this machine's limits and environment: files, shared memory, memory, variables."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from rich.filesize import decimal

from composer_replication.launch.doctor.results import (
    Result,
    failure,
    ok,
    skipped,
    warning,
)
from composer_replication.plan import PlannedRun
from composer_replication.replica.options import NO_TOKEN, TOKEN, ReplicaEnv

SHM = Path("/dev/shm")
FEW_FILES, FEWEST_FILES = 1024, 256
SMALL_SHM = 2**30
"""Below this, data loaders with workers and NCCL are known to die of a bus error; a container has
64 MB unless it is asked for more."""
SHORT_TOKEN = 16
_CGROUP = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def open_files() -> int:
    """Return how many files this process may have open at a time: its soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def check_open_files(limit: int) -> Iterator[Result]:
    """A process may open enough files: sockets to peers, data loaders and shards of data."""
    fix = "ulimit -n 4096, or LimitNOFILE= of the service, before the groups start"
    if limit < FEWEST_FILES:
        yield failure("open files", f"{limit} at most in a process", fix)
    elif limit < FEW_FILES:
        yield warning("open files", f"{limit} at most in a process", fix)
    else:
        yield ok("open files", f"{limit:,} at most in a process")


def check_shared_memory(folder: Path, least: int = SMALL_SHM) -> Iterator[Result]:
    """Shared memory is there and large enough.

    Args:
        folder: Where it is mounted.
        least: How many bytes have to be free.
    """
    name = str(folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield failure(name, "missing, or not writable", f"mount -t tmpfs tmpfs {name}")
        return
    size = shutil.disk_usage(folder)
    value = f"{decimal(size.free)} free of {decimal(size.total)}"
    if size.free < least:
        yield warning(
            name,
            f"{value}: data loaders with workers, and NCCL, may end with a bus error",
            "start the container with --shm-size=8g or --ipc=host, or remove what others left",
        )
    else:
        yield ok(name, value)


def free_memory() -> int:
    """Bytes of host memory that a new process can have, in this container if it is in one."""
    free = psutil.virtual_memory().available
    for limit, used in _CGROUP:
        try:
            free = min(free, int(limit.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no such version of cgroups, or "max"
            continue
    return free


def check_memory(free: int, run: PlannedRun | None, processes: int) -> Iterator[Result]:
    """The host's memory holds global parameters and outer momentum: 8 bytes a parameter, 12 at the
    peak of a sync, and more in a wire format with error feedback.

    Args:
        free: Bytes that are free.
        run: What is planned; None without a number of parameters.
        processes: Of the group on this machine.
    """
    if run is None:
        yield ok(
            "host memory",
            f"{decimal(free)} free: at most {free / 12:.2g} parameters, by 12 bytes each at the "
            "peak of a sync (8 between syncs), beside the model",
        )
        return
    resident, peak = (
        processes * value for value in (run.memory.host_resident, run.memory.host_peak)
    )
    value = (
        f"{decimal(free)} free; {run.params:,} parameters in {run.wire_format} need "
        f"{decimal(round(resident))}, and {decimal(round(peak))} at the peak of a sync"
    )
    fix = "more memory, num_fragments of 2 or more, or fewer parameters to train (LoRA)"
    if peak > free:
        yield failure("host memory", value, fix)
    elif 2 * peak > free:
        yield warning("host memory", f"{value}; model and data come on top", fix)
    else:
        yield ok("host memory", value)


def check_token(env: ReplicaEnv, reaches_others: bool | None) -> Iterator[Result]:
    """The run's secret is set, where other machines can reach the run.

    Args:
        env: This process's variables.
        reaches_others: Whether coordinator or lighthouse are beyond loopback; None: none is named.
    """
    fix = f"export {TOKEN}=... in all groups, the same secret, e.g. of `openssl rand -hex 16`"
    if any(len(token) < SHORT_TOKEN for token in env.tokens):
        shortest = min(map(len, env.tokens))
        yield warning("token", f"set, with {shortest} characters: it can be guessed", fix)
    elif env.tokens:
        yield ok("token", "set" if len(env.tokens) == 1 else "two are set: it is being replaced")
    elif env.no_token:
        yield warning(
            "token", f"none, as {NO_TOKEN} says: every machine that reaches the run can join", fix
        )
    elif reaches_others is None:
        yield skipped("token", f"none is set, which is well on one machine; beyond it {fix}")
    elif reaches_others:
        yield failure("token", "none, and other machines reach this run", fix)
    else:
        yield ok("token", "none is needed: the run is on this machine alone")


def check_variables(environ: Mapping[str, str]) -> Iterator[Result]:
    """Variables that torchft and Composer read, and that have surprised people."""
    if environ.get("RUST_LOG") == "off":
        yield warning("RUST_LOG", "off, which torchft ignores: it logs everything", "use error")
    elif any(level in environ.get("RUST_LOG", "") for level in ("info", "debug", "trace")):
        yield warning(
            "RUST_LOG", f"{environ['RUST_LOG']}: torchft prints some 25 lines a sync", "use warn"
        )
    for name in (
        "TORCHFT_TIMEOUT_SEC",
        "TORCHFT_QUORUM_TIMEOUT_SEC",
        "TORCHFT_CONNECT_TIMEOUT_SEC",
    ):
        if name in environ:
            yield warning(
                name, f"{environ[name]}, which beats the option of the config", f"unset {name}"
            )
    version = environ.get("FSDP_VERSION")
    if version not in (None, "2"):
        yield failure(
            "FSDP_VERSION",
            f"{version}: DiLoCo needs FSDP2, whose parameters keep their names and shapes",
            "export FSDP_VERSION=2",
        )
    else:
        yield ok("FSDP_VERSION", version or "not set, which only a job with FSDP needs (to be 2)")
