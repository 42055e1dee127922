"""Files of a run, on a disk that may be full, and after a power cut; the lock of their folder.

Imports neither torch nor Composer.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""How many lines are kept in memory while their file cannot be written."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Returns:
        The object. It is empty if the file is missing, and also, with a warning in the log, if the
        file cannot be read or holds no object: a power cut leaves empty, cut and zeroed files.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        what = f"cannot be read ({error})"
    else:
        if isinstance(content, dict):
            return content
        what = f"holds {content!r:.40}, which is no JSON object"
    _warn_once(f"{path} is ignored: it {what}")
    return {}


@functools.lru_cache(1000)
def _warn_once(message: str) -> None:  # the display reads a file several times a second
    log.warning(message)


def finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, NaN and infinity, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def replace_json(
    path: Path,
    content: Any,
    *,
    survives_power_cut: bool = False,
    indent: int | None = None,
) -> None:
    """Write a JSON file so that a reader sees the old content or the new, and never half of it.

    Args:
        path: The file. Its folder is made if it is missing.
        content: What to write.
        survives_power_cut: Wait for the disk, since a rename may reach it before the content does.
        indent: Of nested values, for people; None writes one line.

    Raises:
        OSError: It cannot be written. The old content stays.
    """
    text = json.dumps(content, indent=indent) + "\n"
    replace_file(
        path, lambda file: file.write(text.encode()), survives_power_cut=survives_power_cut
    )


def replace_file(
    path: Path,
    write: Callable[[IO[bytes]], object],
    *,
    survives_power_cut: bool = False,
) -> None:
    """Write a file that has all of its content once it has its name.

    Args:
        path: The file. Its folder is made if it is missing.
        write: Writes the content into an open file.
        survives_power_cut: As for ``replace_json``.

    Raises:
        OSError: It cannot be written. The old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    with naming(path), draft.open("wb") as file:
        write(file)
        file.flush()
        if survives_power_cut:
            os.fsync(file.fileno())
    os.replace(draft, path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an ``OSError``; Python does so when it opens a file, and not later."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


class JsonLineWriter:
    """Appends JSON lines to a file. Lines that cannot be written are kept in memory until they can.

    A full disk must not end training, so ``append`` writes nothing and never fails.

    Args:
        path: The file. Its folder is made if it is missing.

    Attributes:
        num_lost: Lines that were dropped because more than ``MAX_WAITING`` waited.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)

    @property
    def num_waiting(self) -> int:
        """How many lines are in memory only."""
        return len(self._waiting)

    def append(self, line: dict[str, Any]) -> None:
        """Add a line for ``flush`` to write. Above ``MAX_WAITING`` the oldest is dropped."""
        self.num_lost += len(self._waiting) == MAX_WAITING
        self._waiting.append(json.dumps(line).encode() + b"\n")

    def flush(self, *, survives_power_cut: bool = False) -> None:
        """Write the lines that are in memory, in order.

        Args:
            survives_power_cut: Wait for the disk.

        Raises:
            OSError: The file cannot be written now. The next call writes the remaining lines.
        """
        if not self._waiting:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), self.path.open("ab+", buffering=0) as file:
            # Another writer may have been killed in the middle of a line.
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if file.read() not in (b"", b"\n"):
                _append_whole(file, b"\n")
            while self._waiting:
                _append_whole(file, self._waiting[0])
                self._waiting.popleft()
            if survives_power_cut:
                os.fsync(file.fileno())


def _append_whole(file: FileIO, data: bytes) -> None:
    """Append all of the data, or none: a disk that becomes full would take a part of a line."""
    end = file.seek(0, os.SEEK_END)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


class JsonLineReader:
    """Reads a growing file of JSON lines, one line in memory at a time.

    Attributes:
        num_damaged: How many of the lines read so far are not JSON objects, as after a power cut.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.num_damaged = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Read the lines that have been added since the last call.

        A last line without a line break is left for the next call: it is being written.

        Raises:
            OSError: The file cannot be read.
        """
        if not self._path.exists():
            return
        with naming(self._path), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    content = json.loads(line)
                except ValueError:
                    content = None
                if isinstance(content, dict):
                    yield content
                else:
                    self.num_damaged += 1


def open_lock(folder: Path, name: str, fix: str, who: str = "") -> FileIO:
    """Keep other processes, and other calls in this one, out of a folder.

    Args:
        folder: The folder.
        name: The name of the lock's file in it. The file stays there after the lock is released.
        fix: What else to do if another process holds the lock, for the error.
        who: What this process is, for the error that another one then gets.

    Returns:
        A file. The lock ends when it is closed, or with this process, however it ends.

    Raises:
        ValueError: Another process holds the lock.
    """
    path = folder / name
    # In a child process that outlives this one the lock would stay. Python opens files so that
    # programs which it starts do not inherit them; a forked child, as a loader's worker, does.
    file = path.open("ab+", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read(300).decode(errors="replace") or "?"
        file.close()
        raise ValueError(
            f"{folder} is in use by process {owner}: wait for its end, end it, or {fix}"
        ) from error
    except OSError as error:  # a network file system without locks
        log.warning("Cannot lock %s (%s): start no other process in its folder", path, error)
    with contextlib.suppress(OSError):  # a full disk: the process id is only for the error above
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}{who}".encode())
    _locks.add(file)
    return file


_locks: WeakSet[FileIO] = WeakSet()


def _close_locks() -> None:
    for file in _locks:
        file.close()


os.register_at_fork(after_in_child=_close_locks)
atexit.register(_close_locks)  # Python would warn of files that are open at its end


hold_lock = functools.cache(open_lock)
"""Lock a folder until this process ends; a second call in this process changes nothing."""
