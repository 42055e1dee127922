"""Who has changed a run, or tried to: one line each in the log and in ``audit.jsonl``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_replication.coordinator.run_settings import RefusedError
from composer_replication.replica.audit import log, record

AUDIT = "audit.jsonl"
"""The file in the state folder; lines are only ever added."""


class Audit:
    """Writes down who did what, from where, and when.

    A file that cannot be written stops nothing: the log has the same lines, and says so once.

    Args:
        path: The file; it can be read by this user alone.
    """

    WRONG_TOKENS_EVERY_S = 60.0

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_failing = False
        self._wrong_tokens = 0
        self._next_wrong_tokens = 0.0

    @contextmanager
    def action(
        self, what: str, who: str | None, source: str | None, **details: Any
    ) -> Iterator[None]:
        """Write down that the block was done, or why it was refused.

        Args:
            what: ``registration``, ``settings`` or ``rewind``.
            who: The replica group, if the request names one.
            source: The client's address.
            **details: To be written as well; JSON, no secrets.
        """
        try:
            yield
        except RefusedError as error:
            self._write(what, who, source, outcome="refused", why=str(error), **details)
            raise
        self._write(what, who, source, outcome="done", **details)

    def count_wrong_token(self) -> bool:
        """Count a request without the token; whether ``note_wrong_tokens`` is due.

        Once a minute: whoever has no token must not be able to fill the disk.
        """
        self._wrong_tokens += 1
        return time.monotonic() >= self._next_wrong_tokens

    def note_wrong_tokens(self, source: str | None) -> None:
        """Write down how many requests had no valid token, and where the last one came from."""
        with self._lock:
            count, self._wrong_tokens = self._wrong_tokens, 0
            self._next_wrong_tokens = time.monotonic() + self.WRONG_TOKENS_EVERY_S
        if count:
            self._write("wrong token", None, source, outcome="refused", requests=count)

    def _write(self, what: str, who: str | None, source: str | None, **told: Any) -> None:
        line = record(what, who, source, **told)
        try:
            with self._lock:
                # Opened anew each time: the file may be rotated.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                with open(os.open(self._path, flags, 0o600), "a") as file:
                    file.write(line + "\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning(
                    "%s cannot be written, the log alone has the audit: %s", self._path, error
                )
            self._is_failing = True
