"""Replica groups of several ranks as processes, and runs that ``launch`` has started."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from forked_commands import ForkedCommand
from pace import paced
from waiting import wait_until

DEADLINE_S = 600.0  # below pytest's timeout, after which nobody would stop the groups
COMPOSER = ["composer.cli.launcher", "--nproc", "--master_addr", "--master_port"]
TORCHRUN = ["torch.distributed.run", "--nproc-per-node", "--master-addr", "--master-port"]
"""A module, and its options for the number of ranks, the address and the port."""


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


class RunningGroup:
    """The processes of a group, each with the file that has what it says."""

    def __init__(self, *processes: tuple[subprocess.Popen[bytes], Path]) -> None:
        self._processes = processes
        self._deadline = time.monotonic() + DEADLINE_S

    def wait(self) -> None:
        """Until all of it has ended, and well."""
        while None in self.statuses():
            self.check()
            time.sleep(0.05)
        self.check()

    def statuses(self) -> list[int | None]:
        """The exit status of each process, None while it runs."""
        return [process.poll() for process, _ in self._processes]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each process."""
        for process, _ in self._processes:
            process.send_signal(number)

    def check(self) -> None:
        """That nothing of it has failed, and that its time is not over."""
        statuses = self.statuses()
        if any(statuses) or time.monotonic() > self._deadline:
            raise AssertionError(f"exit statuses {statuses}\n{self.said()}")

    def said(self) -> str:
        """The end of what each process has written."""
        return "\n".join(output.read_text()[-4000:] for _, output in self._processes)

    def kill(self) -> None:
        """End all of it with SIGKILL, at once: no rank sees the death of another and leaves."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process, _ in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                process.send_signal(number)  # it may not lead its session yet
        for process, _ in self._processes:
            process.wait()


def start(
    group: int,
    ranks: int,
    script: Path,
    *arguments: object,
    folder: Path,
    launcher: Sequence[str] | None = None,
    **environ: str,
) -> RunningGroup:
    """Start a script as the ranks of a group, all forks; what they say is in ``folder``."""
    paths = [str(script.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ |= {"REPLICA_GROUP_ID": str(group), "PYTHONPATH": os.pathsep.join(paths)}
    words, port = [str(script), *map(str, arguments)], str(free_port())
    if launcher is None:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0"}
        environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    else:
        module, nproc, address, port_option = launcher
        options = [nproc, str(ranks), address, "127.0.0.1", port_option, port]
        words, each = ["-m", module, *options, *words], [{}]
    processes = []
    for number, place in enumerate(each):
        output = folder / f"output_{group}_{number}.txt"
        with output.open("ab") as file:
            process = ForkedCommand(
                [sys.executable, *words],
                env=os.environ | environ | place,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a launcher's ranks too are ended with it
            )
        processes.append((process, output))
    return RunningGroup(*processes)


class Launch:
    """The command ``launch`` as a fork, with its groups; within the context, which ends it.

    Args:
        config: A YAML file.
        run_dir: The run's folder. What the command says is in a file beside it.
        *words: Further words of the command.
        pace_s: By how much every inner step is longer, in seconds.
        **environ: Further variables.
    """

    def __init__(
        self, config: str | Path, run_dir: Path, *words: str, pace_s: float = 0.0, **environ: str
    ) -> None:
        self.run_dir, self._output = run_dir, run_dir.with_suffix(".out")
        command = [sys.executable, "-m", "composer_replication", "launch", str(config)]
        with self._output.open("a") as output:
            self.process = ForkedCommand(
                [*command, f"run_dir={run_dir}", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=paced(pace_s) | environ,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def said(self) -> str:
        return self._output.read_text()

    def folder(self, replica_id: int) -> Path:
        return self.run_dir / f"replica_{replica_id}"

    def wait_until(self, is_so: Callable[[], Any]) -> Any:
        def look() -> Any:
            assert self.process.poll() is None, self.said()
            return is_so()

        return wait_until(look, said=self.said)

    def stop(self) -> None:
        """Let the groups end at their next sync."""
        (self.run_dir / "STOP").touch()

    def summary(self) -> dict[str, Any]:
        """Of the run, which has to end well."""
        assert self.process.wait(240) == 0, self.said()[-4000:]
        return json.loads((self.run_dir / "summary.json").read_text())

    def leader_of(self, replica_id: int) -> psutil.Process | None:
        """The process of a group, or None.

        It is known by where its output goes: a fork has the command line of its origin.
        """
        for process in psutil.Process(self.process.pid).children():
            with suppress(OSError):  # it has ended
                if f"/replica_{replica_id}/" in os.readlink(f"/proc/{process.pid}/fd/1"):
                    return process
        return None

    def kill_all(self) -> None:
        processes = psutil.Process(self.process.pid).children(recursive=True)
        for process in [*processes, psutil.Process(self.process.pid)]:
            process.kill()
        psutil.wait_procs(processes, timeout=10)
        self.process.wait()
