"""Keeps an error in output, such as a progress bar, from ending a training. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

_logged: set[str] = set()
"""What has failed already, so that it is logged once."""


@contextmanager
def fence(what: str) -> Iterator[None]:
    """A context, or a decorator, that logs an error instead of raising it.

    It is for what only shows how a training goes: progress bars, log lines, pages, events, metrics;
    and for one of many attempts on a thread of its own, such as a heartbeat. A full disk, a closed
    stdout or an error in a user's logger then costs that output alone. The first error is one line
    in the log.

    Nothing that other ranks wait for, such as a collective, may be inside: after an error on one
    rank the others would wait in it for ever.

    Args:
        what: What is shown, for the line in the log.
    """
    try:
        yield
    except Exception as error:
        if what not in _logged:
            _logged.add(what)
            with suppress(Exception):  # the log may be what has failed
                log.warning(
                    "Cannot show %s, and goes on without it: %s: %s",
                    what,
                    type(error).__name__,
                    error,
                )
