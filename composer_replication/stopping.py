"""Ends a process that was told to stop and hangs in a collective that its peers will never join.

Inside a collective no Python runs, a signal's handler neither. And Composer's ``Trainer.close``
has a barrier: a rank that stops waits there for one that still waits for it in an allreduce, for as
long as torch.distributed's timeout.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)

STUCK_S = 3.0
"""How long the main thread may stand at one place of ``COLLECTIVES`` after a stop, in seconds."""

WATCHED_S = 120.0
"""How long after a stop it is looked at: saving and uploading may take their time."""

COLLECTIVES = ("torch/distributed/", "torch/autograd/", "composer/utils/dist.py")

_installed: int | None = None


def watch_for_stops() -> None:
    """Watch for SIGTERM and SIGINT, once in a process; call it in the main thread.

    The interpreter writes a signal's number into a pipe at once, whatever the main thread is at.
    Without handlers of its own, or where somebody else has such a pipe, nothing is changed.
    """
    global _installed
    if _installed is not None or threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
        return
    _installed = writing
    threading.Thread(target=_watch, args=(reading,), name="stop watch", daemon=True).start()


def expect_end(status: int) -> None:
    """Say that this process is ending for another reason than a signal, with this exit status."""
    if _installed is not None:
        os.write(_installed, bytes([0, status]))


def _watch(reading: int) -> None:
    while True:
        number = os.read(reading, 1)[0]
        if number in (signal.SIGTERM, signal.SIGINT):
            _end_if_stuck(128 + number)
        elif number == 0:
            _end_if_stuck(os.read(reading, 1)[0])


def _end_if_stuck(status: int) -> None:
    end = time.monotonic() + WATCHED_S
    place, since = None, time.monotonic()
    while time.monotonic() < end:
        now_at = _where_the_main_thread_waits()
        if now_at is None or now_at != place:
            place, since = now_at, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            log.warning("Told to stop while waiting in %s: ended with status %d", now_at[0], status)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        time.sleep(0.1)


def _where_the_main_thread_waits() -> tuple[str, int, int] | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return None
    path = Path(frame.f_code.co_filename).as_posix()
    if not any(part in path for part in COLLECTIVES):
        return None
    return f"{frame.f_code.co_name} ({path})", id(frame), frame.f_lasti
