"""What the package logs, for tests that read it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger("composer_replication")


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def kept_messages() -> list[str]:
    """What the package logs in this process from now on."""
    kept = Kept()
    LOG.addHandler(kept)
    LOG.setLevel(logging.WARNING)
    return kept.messages


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs inside of the context."""
    kept = Kept()
    LOG.addHandler(kept)
    try:
        yield kept.messages
    finally:
        LOG.removeHandler(kept)
