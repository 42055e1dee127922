"""Processes as forks of one that has imported torch, torchft and Composer.

Importing them takes 5 s of a processor in each process that is started afresh. Python's fork server
does it once for each pytest process (``PRELOAD``), and each of its forks is as good as new: the
server only imports, and has no thread, socket or process group that a fork could share. Commands,
launchers too, are forks by way of ``forked_commands.py``. What is about the start itself or about
the end of an interpreter starts a fresh process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping
from pathlib import Path

# The server's path begins at the folder in which pytest was started.
PRELOAD = ["tests.forked_imports"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)  # before the first fork, which starts the server


def begin_fork() -> None:
    """The first call in a fork: check the server, and leave what it has imported alone.

    The server must have no thread: a lock that one of its threads holds stays held here. What it
    has imported is never garbage; each look of the collector at it would copy 100 MB of pages.
    """
    threads = os.listdir(f"/proc/{os.getppid()}/task")
    assert len(threads) == 1, f"the fork server has {len(threads)} threads: see tests/forked.py"
    gc.freeze()
    gc.enable()


class Script:
    """``python SCRIPT ARGUMENTS`` as the leader of a session of its own.

    Args:
        script: A Python file.
        *arguments: Of the command line.
        environ: What differs from this process's environment.
        output: A file for what it writes to stdout and stderr.
    """

    def __init__(
        self, script: Path, *arguments: object, environ: Mapping[str, str], output: Path
    ) -> None:
        self._output = output
        command = [str(script), *map(str, arguments)]
        self._process = context.Process(
            target=_run, args=(command, os.environ | environ, os.getcwd(), str(output)), daemon=True
        )
        self._process.start()

    def wait(self, deadline: float) -> None:
        """Until it has ended, which has to be well and before this ``time.monotonic()``."""
        status = self.status(deadline)
        assert status == 0, f"exit status {status}\n{self._output.read_text()[-4000:]}"

    def status(self, deadline: float) -> int | None:
        """With which it has ended; None if it has not, before this ``time.monotonic()``."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL; if it has ended already nothing happens."""
        self._process.kill()
        self._process.join()


def _run(command: list[str], environ: dict[str, str], folder: str, output: str) -> None:
    begin_fork()
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    with open(output, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
