"""Notices that ``Trainer.fit`` has ended, also where Composer has no event for it.

A fit that raises ends without ``fit_end``. If the process lives on, as a notebook or a sweep does,
nobody closes the Trainer: the group's heartbeats would go on, and the other groups wait for it. And
Composer forgets to close it when the process ends: ``Engine.__del__`` of any other Trainer takes
the closes of all of them off ``atexit``, since that compares static methods.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from composer import Trainer

from composer_replication.callback.stuck_process import stack

log = logging.getLogger(__name__)

POLL_S = 0.2

_running: set[Callable[[], None]] = set()
"""What is to be called for each fit that has not been seen to end."""

os.register_at_fork(after_in_child=_running.clear)  # a child process is no group


def when_fit_is_over(leave: Callable[[], None]) -> None:
    """Call ``leave`` when the ``Trainer.fit`` that calls this has ended, or the process ends.

    It is called on a thread of its own, at most ``POLL_S`` later. Where it is not ``Trainer.fit``
    that calls, nothing happens.

    Args:
        leave: Does nothing if there is nothing left to do.
    """
    fit = _frame_of_fit()
    if fit is not None:
        _running.add(leave)
        arguments = (threading.get_ident(), fit, leave)
        threading.Thread(target=_watch, args=arguments, name="fit watch", daemon=True).start()


def trainer_in_fit() -> Trainer | None:
    """The Trainer whose ``fit`` calls this; it knows what Composer's ``State`` does not."""
    fit = _frame_of_fit()
    return None if fit is None else fit.f_locals["self"]


def _frame_of_fit() -> FrameType | None:
    return next((f for f in stack(sys._getframe()) if f.f_code is Trainer.fit.__code__), None)


def _watch(thread_id: int, fit: FrameType, leave: Callable[[], None]) -> None:
    # No frame but this one is kept while it sleeps: frames keep their functions' tensors.
    while any(frame is fit for frame in stack(sys._current_frames().get(thread_id))):
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
            log.exception("A replica group has not left cleanly at the end of its process")
