"""A lock with which one process at a time works in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_held: dict[Path, int] = {}
"""The file descriptors of the locks that this process holds, by the files they lock."""


def lock_folder(folder: Path, name: str, fix: str) -> None:
    """Keep other processes out of a folder until this one ends, however it ends.

    Args:
        folder: The folder.
        name: The name of the lock's file in it. The file stays there after the lock is released.
        fix: What else to do if another process holds the lock, for the error.

    Raises:
        ValueError: Another process holds the lock.
    """
    path = (folder / name).resolve()
    if path not in _held:
        _held[path] = open_lock(folder, name, fix)


def open_lock(folder: Path, name: str, fix: str) -> int:
    """Lock a folder until the returned file descriptor is closed, or this process ends.

    The lock keeps out other processes and other calls in this process. Arguments and errors are
    those of ``lock_folder``.
    """
    path = folder / name
    # Python opens files so that child processes do not inherit them. In a child that outlives this
    # process the lock would stay.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(descriptor, 20).decode(errors="replace") or "?"
        os.close(descriptor)
        raise ValueError(
            f"{folder} is in use by process {owner}: wait for its end, end it, or {fix}"
        ) from error
    except OSError as error:  # a network file system without locks
        log.warning("Cannot lock %s (%s): start no other process in its folder", path, error)
    with contextlib.suppress(OSError):  # a full disk: the process id is only for the error above
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    return descriptor
