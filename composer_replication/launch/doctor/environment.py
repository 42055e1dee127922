"""The command ``env``: what a bug report needs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

import psutil
from rich.filesize import decimal

from composer_replication import __version__
from composer_replication.launch.doctor.machine import free_memory, open_files
from composer_replication.launch.doctor.versions import Installed
from composer_replication.replica.options import TOKEN

TIMEOUT_S = 120.0
PREFIXES = (
    "COMPOSER_REPLICATION_", "TORCHFT_", "GLOO_", "NCCL_", "REPLICA_GROUP_ID", "NUM_REPLICA_GROUPS",
    "FSDP_VERSION", "RUST_LOG", "CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "NODE_RANK", "MASTER_",
)  # fmt: skip
"""Beginnings of the names of variables that this package, torchft, torch or Composer read."""


def print_environment() -> None:
    """Print our part, then Composer's ``composer_collect_env``, or torch's without Composer."""
    for name, value in environment(Installed.here(), os.environ):
        print(f"{name:<24}{value}")
    module = "composer" if find_spec("composer") else "torch"
    print(f"\n{module}.utils.collect_env:", flush=True)
    # In a process of its own: it starts many programs, and imports all of Composer.
    program = f"from {module}.utils.collect_env import main; main()"
    command = [sys.executable, "-c", program]
    try:
        subprocess.run(command, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"(ended after {TIMEOUT_S:g} s: run it alone: python -c '{program}')")


def environment(installed: Installed, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and value of what is ours to know; a token is never among the values.

    Args:
        installed: What is installed.
        environ: Environment variables.
    """
    yield "composer-replication", __version__
    yield "python", f"{installed.python}, {platform.platform()}"
    for name, version in sorted(installed.versions.items()):
        if name != "composer-replication":
            yield name, version
    yield "cpus", str(psutil.cpu_count())
    yield "host memory", f"{decimal(free_memory())} free"
    yield "open files", str(open_files())
    stats = psutil.net_if_stats()
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name in stats and stats[name].isup:
            yield f"interface {name}", f"{len(addresses)} addresses, MTU {stats[name].mtu}"
    for name in sorted(environ):
        if name.startswith(PREFIXES):
            yield name, "(set)" if name == TOKEN else environ[name]
