"""Keeps a second coordinator off a state folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

LOCK = "lock"
"""The locked file in the state folder; it names the process that serves the folder."""


def lock_state(state_dir: Path) -> IO[str]:
    """Lock a state folder until the returned file is closed, or this process ends in any way.

    Two coordinators on one folder would each take the other's groups for dead, end their streams
    and give their names away.

    Raises:
        ValueError: Another process serves the folder; the message names it.
    """
    file = (state_dir / LOCK).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file
    except BlockingIOError:
        file.seek(0)
        holder = file.read(300)
        file.close()
        raise ValueError(
            f"{state_dir} is served by {holder or 'another process'}: end that coordinator, or use "
            "another folder for another run"
        ) from None
    except BaseException:
        file.close()
        raise
