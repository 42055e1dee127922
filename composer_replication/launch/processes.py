"""Starts replica groups as processes of this machine, and leaves none behind."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, BinaryIO, Self
from uuid import uuid4

import psutil

from composer_replication.group.run_folder import log_path

log = logging.getLogger(__name__)

ReplicaId = int | str
"""The number of a group that ``launch`` runs, or the name that an engine has given to one."""

GRACE_S = 5.0
"""Seconds that processes have to end after SIGTERM before they are killed."""

POLL_S = 0.1

_MARK = "_COMPOSER_REPLICATION_GROUP"
"""A variable that names the group in the environment of its processes. torchrun makes each rank a
session of its own, and a rank whose agent has been killed is no longer below the group either.
"""

# It ends a group when the launcher is gone, however that died: its standard input is a pipe from
# the launcher, which then closes.
_WATCHDOG = f"""
read -r _
kill -s TERM -- -$0
sleep 5
kill -s KILL -- -$0 $(grep -lsz "^{_MARK}=$1$" /proc/[0-9]*/environ | cut -d / -f 3)
"""

_NOISE = [
    # Colours, and the rank that torch writes before every line of a traceback.
    re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[rank\d+\]: ?", re.M),
    # The frames of a traceback.
    re.compile(r"^Traceback \(.*\n(?: .*\n?)*", re.M),
    # Lines that Composer's launcher adds below the error of a rank.
    re.compile(r"^(?:ERROR:__main__:|-{10}|Waiting up to|Global rank \d+ \(PID).*", re.M),
]
"""What is no information in a group's log."""

_END_BYTES = 2**16
"""How much of a group's log is read to find its error."""


def _start(command: list[str], stdin: int = DEVNULL, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen[bytes](command, stdin=stdin, start_new_session=True, **options)


class Interrupts(ExitStack):
    """Counts Ctrl-C and SIGTERM while it is open.

    It raises nothing: an exception in the middle of a start or a stop would leave processes behind.
    What is entered into this stack is closed while they are still counted.

    Attributes:
        count: Signals received so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._count_signal)
            self.callback(signal.signal, number, before)
        return self

    def _count_signal(self, *signal_and_frame: object) -> None:
        self.count += 1


class ReplicaGroups:
    """The processes of the replica groups. Leaving the context ends every one of them.

    They get SIGTERM, and SIGKILL after ``GRACE_S`` seconds. Each group is a session of its own, and
    has a variable of its own in its environment. The terminal's Ctrl-C then reaches the launcher
    alone, and a group's ranks and loader workers can be found after the process that started them
    has died.

    Args:
        run_dir: The run's folder. A group's log is ``replica_<id>/log.txt`` in it.
        interrupts: A further interrupt while processes are being stopped kills them at once.
        keeps_logs: Whether a group's output goes into its log. Else it goes where this process's
            own goes.

    Attributes:
        run_dir: The same.
        interrupts: The same.
    """

    def __init__(self, run_dir: Path, interrupts: Interrupts, *, keeps_logs: bool = True) -> None:
        self.run_dir = run_dir
        self._keeps_logs = keeps_logs
        self.interrupts = interrupts
        self._run = uuid4().hex
        self._processes: dict[ReplicaId, subprocess.Popen[bytes]] = {}
        self._watchdogs: dict[ReplicaId, subprocess.Popen[bytes]] = {}
        """The watchdog of each group of which a process may be alive."""

    def __enter__(self) -> ReplicaGroups:
        return self

    def __exit__(self, *exception: object) -> None:
        members = self.members(*self._watchdogs)
        _send(members, psutil.Process.resume)  # a stopped process does not act on SIGTERM
        _send(members, psutil.Process.terminate)
        deadline = time.monotonic() + GRACE_S
        self._wait(members, deadline, min(self.interrupts.count, 1))  # one may have led here
        # Again: the processes may have started others meanwhile, which would be left behind.
        members |= self.members(*self._watchdogs)
        _send(members, psutil.Process.kill)
        self._wait(members, deadline + 2)
        for replica_id in self._processes:
            self.end(replica_id)

    def start(self, replica_id: ReplicaId, command: list[str], environ: dict[str, str]) -> None:
        """Start a replica group.

        Args:
            replica_id: The group's id.
            command: Its command line.
            environ: Its environment variables.

        Raises:
            OSError: The command cannot be started.
        """
        log_file = _open_log(log_path(self.run_dir, replica_id)) if self._keeps_logs else None
        with log_file or nullcontext():
            marked = environ | {_MARK: self._mark(replica_id)}
            process = _start(command, env=marked, stdout=log_file, stderr=log_file)
        self._processes[replica_id] = process
        # A process of its own, since no handler runs in a launcher that is killed. It reads a pipe,
        # since PR_SET_PDEATHSIG reaches children alone, not the ranks below Composer's launcher.
        watchdog = ["/bin/sh", "-c", _WATCHDOG, str(process.pid), self._mark(replica_id)]
        options = {"stdin": PIPE, "stdout": DEVNULL, "stderr": DEVNULL}
        try:
            self._watchdogs[replica_id] = _start(watchdog, **options)
        except OSError:  # nothing else would end the group
            os.killpg(process.pid, signal.SIGKILL)
            raise

    def last_line(self, replica_id: ReplicaId) -> str:
        """Return the last informative line of a group's log; empty if there is none, or no log."""
        with suppress(OSError):
            return "".join(last_lines(log_path(self.run_dir, replica_id), limit=1))
        return ""

    def exit_statuses(self) -> dict[ReplicaId, int | None]:
        """The exit status of each group; None while it runs, negative if a signal ended it."""
        return {replica_id: process.poll() for replica_id, process in self._processes.items()}

    def end(self, replica_id: ReplicaId) -> None:
        """Kill what is left of a group that has ended: ranks and loader workers."""
        _send(self.members(replica_id), psutil.Process.kill)
        # The kernel may give the group's number to another process.
        if watchdog := self._watchdogs.pop(replica_id, None):
            watchdog.kill()
            watchdog.communicate()

    def members(self, *replica_ids: ReplicaId) -> set[psutil.Process]:
        """All processes that have the sessions or the marks of these groups, and those below."""
        living = [id for id in replica_ids if id in self._watchdogs]
        leaders = {self._processes[id].pid for id in living}
        marks = {self._mark(id) for id in living}
        members = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                # The environment of another user's process cannot be read, its session can.
                if os.getsid(process.pid) in leaders or process.environ().get(_MARK) in marks:
                    members |= {process, *process.children(recursive=True)}
        return members

    def _mark(self, replica_id: ReplicaId) -> str:
        return f"{self._run}-{replica_id}"

    def _wait(
        self,
        members: set[psutil.Process],
        deadline: float,
        interrupts: float = math.inf,
    ) -> None:
        """Wait for the end of processes, until a time or another interrupt after so many."""
        while time.monotonic() < deadline and self.interrupts.count <= interrupts:
            self.exit_statuses()  # reaps our children, which would otherwise stay as zombies
            if not any(map(_is_alive, members)):
                return
            time.sleep(0.02)


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")  # a restarted group appends to the same log
    except OSError as error:  # a full disk must not end the groups that train
        log.warning("Cannot open %s, the group's output is lost: %s", path, error)
        return open(os.devnull, "ab")


def _send(members: set[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in members:
        with suppress(psutil.Error):
            send(process)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # An orphan whose new parent does not reap it stays a zombie, which has ended.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def last_lines(path: Path, limit: int = 12) -> list[str]:
    """The last informative lines of a log, without traceback frames and without duplicates.

    Args:
        path: The log file.
        limit: Most lines to return.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _END_BYTES))
        text = file.read().decode(errors="replace")
    for noise in _NOISE:
        text = noise.sub("", text)
    lines = filter(None, map(str.rstrip, text.splitlines()))
    return [*dict.fromkeys(lines)][-limit:]
