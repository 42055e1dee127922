"""Waits that a signal can interrupt, and that do not hold up the end of the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from threading import Thread
from typing import Any


class InterruptibleWork:
    """Waits for a collective in small sleeps: gloo's own wait holds signals up for ``timeout``.

    Args:
        work: torchft's Work.
        is_broken: Whether the collective can never end well. The wait then ends without it. Its
            tensors must not be used again: gloo may write to them until its own ``timeout``.
    """

    LONGEST_NAP_S = 0.01

    def __init__(self, work: Any, is_broken: Callable[[], bool]) -> None:
        self._work = work
        self._is_broken = is_broken

    def wait(self, timeout: timedelta | None = None) -> bool:
        sent = getattr(self._work, "_work", None)  # none if the manager had failed before
        began = time.monotonic()
        while sent is not None and not sent.is_completed():
            if self._is_broken():
                return False
            time.sleep(min(self.LONGEST_NAP_S, (time.monotonic() - began) / 20))
        return self._work.wait() if timeout is None else self._work.wait(timeout)


class DaemonExecutor(futures.Executor):
    """Runs each call on a thread of its own that does not hold up the end of the process.

    Python waits for the threads of a ThreadPoolExecutor, here for a quorum of up to an hour.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: B036 - raised where the result is read
                future.set_exception(error)

        Thread(target=run, name="torchft", daemon=True).start()
        return future
