"""Ends a rank that waits too long in the barrier of Composer's ``Trainer.close``.

After an exception or SIGTERM one rank closes its Trainer and waits in that barrier, while another
rank still waits for it in an allreduce, where no Python code runs, not even a signal handler.
Without this module both would wait until torch.distributed's timeout.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from composer import Trainer
from composer.utils import dist

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a rank may wait in that barrier, in seconds. Others may still close their loggers."""

POLL_S = 0.2


def end_if_stuck_in_close(error: BaseException | None) -> None:
    """End this process if the ``Trainer.close`` that calls this waits too long for other ranks.

    A thread watches the calling thread until this ``Trainer.close`` has returned. Only its barrier
    counts, so nothing that the process does later, or that another Trainer does, can end the
    process. If the caller is not ``Trainer.close``, nothing happens.

    Args:
        error: The error that made the Trainer close. The process ends with the status that this
            error would have caused.
    """
    closing = next((f for f in stack(sys._getframe()) if f.f_code is Trainer.close.__code__), None)
    if closing is not None:
        arguments = (threading.get_ident(), closing, _exit_status(error))
        threading.Thread(target=_watch, args=arguments, name="close watch", daemon=True).start()


def _watch(thread_id: int, closing: FrameType, status: int) -> None:
    since = time.monotonic()
    while closing in (frames := list(stack(sys._current_frames().get(thread_id)))):
        in_barrier = any(
            frame.f_code is dist.barrier.__code__ and frame.f_back is closing for frame in frames
        )
        if not in_barrier:
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:
            _end(status)
        time.sleep(POLL_S)


def _end(status: int) -> None:
    log.error(
        "The other ranks of this group have not reached the end of Trainer.close within %g s: this "
        "rank ends with status %d. The stacks of its threads follow",
        GRACE_S,
        status,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os._exit(status)


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on to the first frame of the thread."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _exit_status(error: BaseException | None) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code  # Composer turns signals into these
    return 1
