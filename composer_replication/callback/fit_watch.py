"""Notices when ``Trainer.fit`` has ended, also where Composer has no event for it.

A fit that raises ends without ``fit_end``. If the process lives on, as in a notebook or a sweep,
no code closes the Trainer: the group would keep sending heartbeats, and the other groups would wait
for it. Composer may also fail to close the Trainer when the process ends: ``Engine.__del__`` of any
other Trainer unregisters the closes of all Trainers from ``atexit``, because ``atexit`` compares
static methods.
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
"""The ``leave`` of each fit that has not ended."""

os.register_at_fork(after_in_child=_running.clear)  # a forked child is no replica group


def when_fit_is_over(leave: Callable[[], None]) -> None:
    """Call ``leave`` when the ``Trainer.fit`` that calls this has ended, or the process ends.

    It is called on another thread, at most ``POLL_S`` seconds later. If the caller is not
    ``Trainer.fit``, nothing happens.

    Args:
        leave: Has no effect if the group has already left.
    """
    fit = _frame_of_fit()
    if fit is not None:
        _running.add(leave)
        arguments = (threading.get_ident(), fit, leave)
        threading.Thread(target=_watch, args=arguments, name="fit watch", daemon=True).start()


def trainer_in_fit() -> Trainer | None:
    """Return the Trainer whose ``fit`` calls this. Composer's ``State`` has no reference to it."""
    fit = _frame_of_fit()
    return None if fit is None else fit.f_locals["self"]


def _frame_of_fit() -> FrameType | None:
    return next((f for f in stack(sys._getframe()) if f.f_code is Trainer.fit.__code__), None)


def _watch(thread_id: int, fit: FrameType, leave: Callable[[], None]) -> None:
    # The thread keeps no frame but this one while it sleeps: a frame keeps its tensors alive.
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
            log.exception("A replica group could not leave cleanly at the end of its process")
