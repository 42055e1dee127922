"""Waits for what other processes do, and stops a server of this one, for the tests."""

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(
    is_so: Callable[[], Found], seconds: float = 240.0, said: Callable[[], object] = lambda: ""
) -> Found:
    """Wait until something is so, and return what it is.

    Args:
        is_so: Whether it is so.
        seconds: How long to wait at most.
        said: What to show if it never is.
    """
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
    return found


def stop_accepting(port: int) -> None:
    """End a server of torchft's in this process: it has no file descriptor for a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        strangers = [opened.enter_context(socket.socket()) for _ in range(20)]
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        # Not lower: torch's store ends a process whose limit is below what it polls.
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, hard))
        for stranger in strangers:
            with suppress(OSError):
                while True:
                    opened.enter_context(open(os.devnull))
            stranger.settimeout(3.0)
            # Accepted after all, if the server closed an earlier connection in between.
            with suppress(TimeoutError):
                with suppress(ConnectionError):  # closed before it was accepted
                    stranger.connect(("127.0.0.1", port))
                    assert not stranger.recv(1), "the server has answered"
                return
        raise AssertionError("the server accepts connections without a file descriptor")
