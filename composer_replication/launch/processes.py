"""Starts replica groups as processes of this machine, and leaves none behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

import psutil

from composer_replication.group.run_folder import log_path

log = logging.getLogger(__name__)

ReplicaId = int | str
"""The number of a group that ``launch`` runs, or the name that an engine has given to one."""

GRACE_S = 5.0
"""Seconds that processes have to end after SIGTERM before they are killed."""


POLL_S = 0.1

# Every line that it reads lists the process groups that live. When the launcher is gone, however it
# died, it ends those of the last line. It spares earlier ones: the kernel may have given their
# numbers to other processes.
_WATCHDOG = """
while read -r line; do groups=$line; done
[ -z "$groups" ] || { kill -s TERM -- $groups; sleep 5; kill -s KILL -- $groups; }
"""


# Colours, and the rank that torch writes before every line of a traceback.
_DECORATION = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[rank\d+\]: ?", re.MULTILINE)

# Lines that Composer's launcher adds below the error of a rank.
_LAUNCHERS_OWN = re.compile(r"(ERROR:__main__:|-{10}|Waiting up to|Global rank \d+ \(PID)")


# As our command prints an error, or as Python does, with our own classes' modules left out.
_ERROR = re.compile(
    r"Error: (.+)|(?:composer_replication[.\w]*\.)?(\w[.\w]*(?:Error|Exception|Mismatch): .+)"
)

_END_BYTES = 2**16
"""How much of a group's output is kept, or read, to find its error."""


class Interrupts:
    """Counts Ctrl-C and SIGTERM while it is open.

    It raises nothing: an exception in the middle of a start or a stop would leave processes behind.

    Attributes:
        count: Signals received so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count_signal(self, *signal_and_frame: object) -> None:
        self.count += 1


class ReplicaGroups:
    """The processes of the replica groups. Leaving the context ends every one of them.

    Each group is a session of its own. The terminal's Ctrl-C then reaches the launcher alone, and a
    group's ranks and loader workers can be found after the process that started them has died.

    Args:
        run_dir: The run's folder. A group's output is appended to ``replica_<id>/log.txt`` in it.
            None: it goes where this process's own goes.
        interrupts: A further interrupt while processes are being stopped kills them at once.

    Attributes:
        interrupts: The same.
    """

    def __init__(self, run_dir: Path | None, interrupts: Interrupts) -> None:
        self._run_dir = run_dir
        self.interrupts = interrupts
        self._processes: dict[ReplicaId, subprocess.Popen[bytes]] = {}
        self._leaders: dict[ReplicaId, int] = {}
        """Pid, and so session id, of each group of which a process may be alive."""
        self._errors: dict[ReplicaId, _Forwarded] = {}
        self._watchdog = _start_watchdog()

    def __enter__(self) -> ReplicaGroups:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        for errors in self._errors.values():
            errors.end()  # this process may end at once, and the last lines say why
        self._watchdog.kill()
        self._watchdog.communicate()

    def start(self, replica_id: ReplicaId, command: list[str], environ: dict[str, str]) -> None:
        """Start a replica group.

        Args:
            replica_id: The group's id.
            command: Its command line.
            environ: Its environment variables.

        Raises:
            OSError: The command cannot be started.
        """
        output = None if self._run_dir is None else _open_log(log_path(self._run_dir, replica_id))
        with output or contextlib.nullcontext():
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                # What it writes on stderr passes through us if it has no log, since its last error
                # says whether it may be started again.
                stderr=subprocess.PIPE if output is None else subprocess.STDOUT,
                start_new_session=True,
            )
        if process.stderr is not None:
            self._errors[replica_id] = _Forwarded(process.stderr)
        self._processes[replica_id] = process
        self._leaders[replica_id] = process.pid
        self._update_watchdog()

    def last_error(self, replica_id: ReplicaId) -> str:
        """Return the last error of a group that has ended, in the one line that was printed.

        Returns:
            The line; empty if there is none, or no log.
        """
        lines: list[str] = []
        if self._run_dir is None:
            lines = _informative(self._errors[replica_id].end())
        else:
            with contextlib.suppress(OSError):
                lines = last_lines(log_path(self._run_dir, replica_id), limit=100)
        found = filter(None, map(_ERROR.match, reversed(lines)))
        return next((match[1] or match[2] for match in found), "")

    def exit_statuses(self) -> dict[ReplicaId, int | None]:
        """The exit status of each group; None while it runs, negative if a signal ended it."""
        return {replica_id: process.poll() for replica_id, process in self._processes.items()}

    def end(self, replica_id: ReplicaId) -> None:
        """Kill what is left of a group that has ended: ranks and loader workers."""
        _send(self.members(replica_id), psutil.Process.kill)
        if self._leaders.pop(replica_id, None) is not None:
            self._update_watchdog()

    def members(self, replica_id: ReplicaId) -> set[psutil.Process]:
        """All processes of a group; empty if it has ended."""
        pid = self._leaders.get(replica_id)
        return set() if pid is None else self._processes_of({pid})

    def _update_watchdog(self) -> None:
        if self._watchdog.poll() is not None:  # somebody has killed it, and the groups go on
            self._watchdog.communicate()
            self._watchdog = _start_watchdog()
        assert self._watchdog.stdin is not None, "opened as a pipe"
        line = " ".join(f"-{pid}" for pid in self._leaders.values())
        self._watchdog.stdin.write(f"{line}\n".encode())
        self._watchdog.stdin.flush()

    def stop(self) -> None:
        """End all processes of all groups: SIGTERM, then SIGKILL after ``GRACE_S`` seconds."""
        members = self._processes_of(set(self._leaders.values()))
        _send(members, psutil.Process.resume)  # a stopped process does not act on SIGTERM
        _send(members, psutil.Process.terminate)
        deadline = time.monotonic() + GRACE_S
        count_before = min(self.interrupts.count, 1)  # the interrupt that led here
        while self._any_alive(members) and time.monotonic() < deadline:
            if self.interrupts.count > count_before:
                break
            time.sleep(0.05)
        # Again: the processes may have started others meanwhile, which would be left behind.
        members |= self._processes_of(set(self._leaders.values()))
        _send(members, psutil.Process.kill)
        while self._any_alive(members) and time.monotonic() < deadline + 2:
            time.sleep(0.02)

    def _processes_of(self, leaders: set[int]) -> set[psutil.Process]:
        """All processes in the sessions of these leaders, and those below them."""
        members = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in leaders:
                    members |= {process, *process.children(recursive=True)}
        return members

    def _any_alive(self, members: set[psutil.Process]) -> bool:
        self.exit_statuses()  # reaps our children, which would otherwise stay as zombies
        return any(_is_alive(process) for process in members)


def _start_watchdog() -> subprocess.Popen[bytes]:
    # A process of its own, since no handler runs in a launcher that is killed. It reads a pipe,
    # since PR_SET_PDEATHSIG reaches children alone, not the ranks below Composer's launcher.
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class _Forwarded:
    """Writes what comes from a pipe to stderr, and keeps the end of it.

    It reads on if stderr is closed or its disk is full: the group must not wait for it.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = b""
        self._thread = threading.Thread(target=self._forward, daemon=True)
        self._thread.start()

    def _forward(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _END_BYTES):
                self._kept = (self._kept + chunk)[-_END_BYTES:]
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.flush()

    def end(self) -> bytes:
        """Return the end, once all processes that could write have ended."""
        self._thread.join(GRACE_S)  # a process that has left the session may hold the pipe
        return self._kept


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")  # a restarted group appends to the same log
    except OSError as error:  # a full disk must not end the groups that train
        log.warning("Cannot open %s, the group's output is lost: %s", path, error)
        return open(os.devnull, "ab")


def _send(members: set[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in members:
        with contextlib.suppress(psutil.Error):
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
        return _informative(file.read())[-limit:]


def _informative(output: bytes) -> list[str]:
    lines: dict[str, None] = {}  # a set that keeps the order
    in_traceback = False
    for line in _DECORATION.sub("", output.decode(errors="replace")).splitlines():
        in_traceback = line.startswith("Traceback (") or (in_traceback and line.startswith(" "))
        if line.strip() and not in_traceback and not _LAUNCHERS_OWN.match(line):
            lines[line.rstrip()] = None
    return list(lines)
