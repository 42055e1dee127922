"""A replica group of several ranks: under a launcher, or as forks that need no import."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import psutil
from forked import Script
from forked_commands import ForkedCommand

DEADLINE_S = 600.0  # below pytest's timeout, after which nobody would stop the groups
COMPOSER = ["composer.cli.launcher", "--nproc", "--master_addr", "--master_port"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "--master-addr", "--master-port"]
"""A module, and its options for the number of ranks, the address and the port."""


class RunningGroup(Protocol):
    def wait(self, deadline: float) -> None:
        """Until all of it has ended, well and before this ``time.monotonic()``."""

    def kill(self) -> None:
        """End all of it with SIGKILL."""


def free_port() -> int:
    """One that is free, as is the next; of those that the system does not give to clients.

    Else somebody's connection may have it when it is listened at, or again after a restart.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


def start(
    group: int,
    ranks: int,
    script: Path,
    *arguments: object,
    folder: Path,
    launcher: Sequence[str] | None = None,
    is_fresh: bool = False,
    **environ: str,
) -> RunningGroup:
    """Start a script as the ranks of a group; without a launcher their output is in ``folder``.

    If it ``is_fresh``, launcher and ranks are new interpreters, else forks.
    """
    environ |= {"REPLICA_GROUP_ID": str(group)}
    if launcher is None:
        return Ranks(group, ranks, script, *arguments, folder=folder, environ=environ)
    return Launched(launcher, ranks, script, *arguments, environ=environ, is_fresh=is_fresh)


def leader_of(launcher: int, replica_id: int) -> psutil.Process | None:
    """Return the process of a group that ``launch`` has started; None if it has none.

    It is known by where its output goes: a fork has the command line of what it was forked from.
    """
    for process in psutil.Process(launcher).children():
        with suppress(OSError):  # it has ended
            if f"/replica_{replica_id}/" in os.readlink(f"/proc/{process.pid}/fd/1"):
                return process
    return None


class Launched:
    """The ranks of a group under a launcher."""

    def __init__(
        self,
        launcher: Sequence[str],
        ranks: int,
        script: Path,
        *arguments: object,
        environ: dict[str, str],
        is_fresh: bool,
    ) -> None:
        module, nproc, address, port = launcher
        options = [nproc, str(ranks), address, "127.0.0.1", port, str(free_port())]
        paths = [str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        start = subprocess.Popen if is_fresh else ForkedCommand
        self._process = start(
            [sys.executable, "-m", module, *options, str(script), *map(str, arguments)],
            env=os.environ | environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its ranks too are ended with it
        )

    def wait(self, deadline: float) -> None:
        output, _ = self._process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        assert self._process.returncode == 0, output[-4000:]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Ranks:
    """The ranks of a group, each a fork."""

    def __init__(
        self,
        group: int,
        ranks: int,
        script: Path,
        *arguments: object,
        folder: Path,
        environ: dict[str, str],
    ) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._ranks = [
            Script(
                script,
                *arguments,
                environ=environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                output=folder / f"output_{group}_{rank}.txt",
            )
            for rank in range(ranks)
        ]

    def wait(self, deadline: float) -> None:
        for rank in self._ranks:
            rank.wait(deadline)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
