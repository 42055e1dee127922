"""Notices when a function call is over, where a trainer has no event.

A fit that raises ends without an event. If the process lives on, as in a notebook or a sweep, no
code closes the trainer: the group would keep sending heartbeats, and the others would wait for it.
A trainer may also not be closed when the process ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from traceback import walk_stack
from types import FrameType

log = logging.getLogger(__name__)

POLL_S = 0.2

_running: set[Callable[[], None]] = set()
"""The ``leave`` of each fit that has not ended yet."""

os.register_at_fork(after_in_child=_running.clear)  # a forked child process is no replica group


def when_over(function: Callable[..., object], leave: Callable[[], None]) -> Callable[[], object]:
    """Call ``leave`` when the call of a function that calls this has ended, or the process ends.

    It is called on another thread, at most ``POLL_S`` seconds later. If that function is not among
    the callers of this one, nothing happens.

    Args:
        function: A function whose call leads to this call, such as ``Trainer.fit``.
        leave: A function without effect if the group has already left.

    Returns:
        Ends the watch, once the group has left. The thread would be the last to hold the call's
        local variables, and so the trainer, whose own end belongs on the thread that ran it.
    """
    fit = caller(function)
    calls = [] if fit is None else [fit]
    if calls:
        _running.add(leave)
        threading.Thread(
            target=_watch_fit,
            args=(calls, leave),
            name="fit watch",
            daemon=True,
        ).start()
    return calls.clear


def _watch_fit(calls: list[FrameType], leave: Callable[[], None]) -> None:
    while any(map(is_running, calls)):
        time.sleep(POLL_S)
    try:
        leave()
    finally:
        _running.discard(leave)


@atexit.register
def _leave_all() -> None:
    for leave in list(_running):
        try:
            leave()
        except Exception:
            log.exception("A replica group could not leave cleanly at the end of its process")


def caller(function: Callable[..., object]) -> FrameType | None:
    """Return the frame of a function among the callers of this one, on this thread."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code is function.__code__:
            return frame
    return None


def is_running(frame: FrameType) -> bool:
    """Whether a function call has not returned yet, asked from any thread.

    A search in ``sys._current_frames()`` walks the frames of a thread that creates and drops them
    meanwhile, which has crashed the interpreter (Python 3.11). ``clear`` is one call under the
    interpreter's lock: it raises while the frame is in use. Afterwards it drops the frame's local
    variables, which only a debugger could still read.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
