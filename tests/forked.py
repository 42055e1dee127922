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

# The server's path begins at the folder in which pytest was started.
PRELOAD = ["tests.forked_imports"]

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(PRELOAD)  # before the first fork, which starts the server


def begin_fork(collects: bool = True) -> None:
    """The first call in a fork: check the server, and leave what it has imported alone.

    Without ``collects`` the garbage collector stays off, as in a server of further forks.

    The server must have no thread: a lock that one of its threads holds stays held here. What it
    has imported is never garbage; each look of the collector at it would copy 100 MB of pages.
    """
    threads = os.listdir(f"/proc/{os.getppid()}/task")
    assert len(threads) == 1, f"the fork server has {len(threads)} threads: see tests/forked.py"
    gc.freeze()
    if collects:
        gc.enable()
