"""Waits for what other processes do, for the tests."""

import time
from collections.abc import Callable
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
