"""One process at a time works in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_held: dict[Path, int] = {}
"""The file descriptors of the locks that this process holds, by their files."""


def lock_folder(folder: Path, name: str, fix: str) -> None:
    """Keep other processes out of a folder until this one ends, however it ends.

    Args:
        folder: The folder.
        name: The lock's file in it. It stays there, and says nothing when nobody holds it.
        fix: What to do if another process holds it, beside waiting for its end.

    Raises:
        ValueError: Another process holds it.
    """
    path = (folder / name).resolve()
    if path not in _held:
        _held[path] = open_lock(folder, name, fix)


def open_lock(folder: Path, name: str, fix: str) -> int:
    """Keep others out of a folder until the returned file descriptor is closed.

    Others are other processes, and other calls in this one. Arguments and errors: ``lock_folder``.
    """
    path = folder / name
    # Child processes do not inherit it: Python opens files so. The lock would outlive us in them.
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
    with contextlib.suppress(OSError):  # a full disk: the number is for people only
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    return descriptor
