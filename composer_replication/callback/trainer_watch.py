"""Watches Composer's ``Trainer.close``: a rank must not wait there for others that never come.

After an exception or SIGTERM one rank closes its Trainer and waits in the barrier of its ``close``,
while another rank still waits for it in an allreduce, where no Python code runs, not even a signal
handler. Without this module both would wait until torch.distributed's timeout.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from traceback import walk_stack
from types import FrameType

from composer import Trainer
from composer.utils import dist

from composer_replication.diloco.hang_watch import end_process
from composer_replication.group.call_watch import POLL_S, caller, is_running
from composer_replication.util.fence import fence

GRACE_S = 10.0
"""How long a rank may wait in that barrier, in seconds: other ranks may still close their
loggers."""


def trainer_in_fit() -> Trainer | None:
    """Return the Trainer whose ``fit`` calls this. Composer's ``State`` has no reference to it."""
    fit = caller(Trainer.fit)
    return None if fit is None else fit.f_locals["self"]


def end_if_stuck_in_close(error: BaseException | None) -> None:
    """End this process if the ``Trainer.close`` that calls this waits too long for other ranks.

    A thread watches the calling thread until this ``Trainer.close`` has returned. Only its barrier
    counts, so nothing that the process does later, or that another Trainer does, can end the
    process. If the caller is not ``Trainer.close``, nothing happens.

    Args:
        error: The error that made the Trainer close. The process ends with the status that this
            error would have caused.
    """
    closing = caller(Trainer.close)
    if closing is not None:
        threading.Thread(
            target=_watch_close,
            args=(threading.get_ident(), closing, _exit_status(error)),
            name="close watch",
            daemon=True,
        ).start()


def _frame_of(thread_id: int) -> FrameType | None:
    # A garbage collection within the call may let another thread run, which then starts a thread:
    # each would wait for a lock of the other for ever (python issue 106883). Remove this when the
    # oldest Python is 3.11.8, and not 3.12.0.
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if collects:
            gc.enable()


def _watch_close(thread_id: int, closing: FrameType, status: int) -> None:
    since = time.monotonic()
    before = None
    while is_running(closing):
        top = _frame_of(thread_id)
        now = None if top is None else (top, top.f_lasti)
        # It walks the frames of a thread only while that thread waits, see ``is_running``.
        if top is None or now != before or not _is_in_barrier(top, closing):
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:
            _end(status)
        before = now
        time.sleep(POLL_S)


def _is_in_barrier(top: FrameType, closing: FrameType) -> bool:
    return any(
        frame.f_code is dist.barrier.__code__ and frame.f_back is closing
        for frame, _ in walk_stack(top)
    )


def _end(status: int) -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with fence("the last output"):  # the stream may be closed
            stream.flush()
    end_process(
        status,
        "The other ranks of this group have not reached the end of Trainer.close within "
        f"{GRACE_S:g} s: this rank ends with status {status}. The stacks of its threads follow",
    )


def _exit_status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code  # Composer turns signals into SystemExit
    return 1
