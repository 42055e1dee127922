"""Waits that a signal can interrupt, and that do not delay the end of the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from threading import Thread
from typing import Any


class InterruptibleWork:
    """Waits for a collective in short sleeps, between which Python handles signals.

    gloo's own wait is one call into C++, in which Python handles no signal for up to ``timeout``.

    Args:
        work: torchft's ``Work``.
        is_broken: Says whether the collective can never end well. The wait then ends without it.
            The collective's tensors must not be used again: gloo may write to them until its own
            ``timeout``.
    """

    LONGEST_NAP_S = 0.01

    def __init__(self, work: Any, is_broken: Callable[[], bool]) -> None:
        self._work = work
        self._is_broken = is_broken

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the collective.

        Returns:
            False if the collective is broken, else what torchft's ``wait`` returns.
        """
        sent = getattr(self._work, "_work", None)  # torchft sends nothing after an error
        began = time.monotonic()
        while sent is not None and not sent.is_completed():
            if self._is_broken():
                return False
            # A twentieth of the wait so far: short collectives are not made longer by the sleep,
            # and long ones take no processor time from training.
            time.sleep(min(self.LONGEST_NAP_S, (time.monotonic() - began) / 20))
        return self._work.wait() if timeout is None else self._work.wait(timeout)


class DaemonExecutor(futures.Executor):
    """Runs each call on a daemon thread of its own, in the place of torchft's ThreadPoolExecutor.

    At the end of a process, Python waits for the threads of a ThreadPoolExecutor. A process that is
    asked to end while it waits for a quorum would stay for up to an hour.
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
