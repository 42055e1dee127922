"""Calls on threads that do not keep a process from ending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from threading import Thread
from typing import Any


class DaemonExecutor(futures.Executor):
    """Runs each call on a daemon thread of its own.

    At the end of a process, Python waits for the threads of a ThreadPoolExecutor. A process that is
    asked to end while it waits for a quorum, or for the coordinator, would stay for up to an hour.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: B036 - raised where the result is read
                future.set_exception(error)

        Thread(target=run, name="daemon_executor", daemon=True).start()
        return future
