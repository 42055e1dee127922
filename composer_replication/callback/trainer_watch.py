"""Watches Composer's ``Trainer.fit`` and ``Trainer.close``, where Composer has no event.

A fit that raises ends without ``fit_end``. If the process lives on, as in a notebook or a sweep,
no code closes the Trainer: the group would keep sending heartbeats, and the other groups would wait
for it. Composer may also fail to close the Trainer when the process ends: ``Engine.__del__`` of any
other Trainer unregisters the closes of all Trainers from ``atexit``, because ``atexit`` compares
static methods.

After an exception or SIGTERM one rank closes its Trainer and waits in the barrier of its ``close``,
while another rank still waits for it in an allreduce, where no Python code runs, not even a signal
handler. Without this module both would wait until torch.distributed's timeout.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from composer import Trainer
from composer.utils import dist

from composer_replication.diloco.fence import fence

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a rank may wait in that barrier, in seconds. Others may still close their loggers."""

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
    fit = _caller(Trainer.fit)
    if fit is not None:
        _running.add(leave)
        threading.Thread(
            target=_watch_fit, args=(fit, leave), name="fit watch", daemon=True
        ).start()


def trainer_in_fit() -> Trainer | None:
    """Return the Trainer whose ``fit`` calls this. Composer's ``State`` has no reference to it."""
    fit = _caller(Trainer.fit)
    return None if fit is None else fit.f_locals["self"]


def _caller(function: Callable[..., object]) -> FrameType | None:
    """The frame of a function that calls this, on this thread."""
    code = function.__code__
    return next((frame for frame in _stack(sys._getframe()) if frame.f_code is code), None)


def _watch_fit(fit: FrameType, leave: Callable[[], None]) -> None:
    while _is_running(fit):
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


def end_if_stuck_in_close(error: BaseException | None) -> None:
    """End this process if the ``Trainer.close`` that calls this waits too long for other ranks.

    A thread watches the calling thread until this ``Trainer.close`` has returned. Only its barrier
    counts, so nothing that the process does later, or that another Trainer does, can end the
    process. If the caller is not ``Trainer.close``, nothing happens.

    Args:
        error: The error that made the Trainer close. The process ends with the status that this
            error would have caused.
    """
    closing = _caller(Trainer.close)
    if closing is not None:
        arguments = (threading.get_ident(), closing, _exit_status(error))
        threading.Thread(
            target=_watch_close, args=arguments, name="close watch", daemon=True
        ).start()


def _watch_close(thread_id: int, closing: FrameType, status: int) -> None:
    since, before = time.monotonic(), None
    while _is_running(closing):
        top = sys._current_frames().get(thread_id)
        now = None if top is None else (top, top.f_lasti)
        # Only the frames of a thread that waits are walked, see ``is_running``.
        if now is None or now != before or not _is_in_barrier(top, closing):
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:
            _end(status)
        before = now
        time.sleep(POLL_S)


def _is_in_barrier(top: FrameType | None, closing: FrameType) -> bool:
    return any(f.f_code is dist.barrier.__code__ and f.f_back is closing for f in _stack(top))


def _end(status: int) -> None:
    with fence("why this rank ends"):
        log.error(
            "The other ranks of this group have not reached the end of Trainer.close within %g s: "
            "this rank ends with status %d. The stacks of its threads follow",
            GRACE_S,
            status,
        )
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with fence("the last output"):  # the stream may be closed
            stream.flush()
    with fence("the stacks"):
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(status)


def _is_running(frame: FrameType) -> bool:
    """Whether a function call has not returned yet, asked from any thread.

    To look for its frame in ``sys._current_frames()`` would mean to walk the frames of a thread
    that creates and drops them meanwhile, which has crashed the interpreter (Python 3.11).
    ``clear`` is one call, under the interpreter's lock: it raises while the frame is in use. Then
    it drops the frame's local variables, which only a debugger could still read.
    """
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on to the first frame of the thread."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _exit_status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code  # Composer turns signals into these
    return 1
