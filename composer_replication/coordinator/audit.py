"""An audit log: who has changed a run or tried to, in the log and in ``audit.jsonl``."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_replication.coordinator.run_settings import RejectedError

log = logging.getLogger(__name__)

AUDIT = "audit.jsonl"
"""The file in the state folder. Lines are only ever appended."""


class Audit:
    """Writes down who did what, from which address, and when.

    If the file cannot be written, requests are served all the same: the log has the same lines, and
    says once that the file has failed.

    Args:
        path: The file. Only this user can read it.
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
        """Write down that the block was executed, or why it was rejected.

        Args:
            what: ``registration``, ``settings`` or ``rewind``.
            who: The replica group, if the request names one.
            source: Address of the client.
            **details: Further values for the line: JSON, no secrets.
        """
        try:
            yield
        except RejectedError as error:
            self._write(what, who, source, outcome="refused", why=str(error), **details)
            raise
        self._write(what, who, source, outcome="done", **details)

    def count_wrong_token(self) -> bool:
        """Count a request with a wrong token.

        Returns:
            Whether ``write_wrong_tokens`` is due. It is so once a minute: without this limit,
            clients without a token could fill the disk.
        """
        self._wrong_tokens += 1
        return time.monotonic() >= self._next_wrong_tokens

    def write_wrong_tokens(self, source: str | None) -> None:
        """Write down how many requests had a wrong token, and where the last one came from."""
        with self._lock:
            count, self._wrong_tokens = self._wrong_tokens, 0
            self._next_wrong_tokens = time.monotonic() + self.WRONG_TOKENS_EVERY_S
        if count:
            self._write("wrong token", None, source, outcome="refused", requests=count)

    def _write(self, what: str, who: str | None, source: str | None, **details: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "what": what, "who": who, "from": source} | details)
        log.info("%s", line)
        try:
            with self._lock:
                # Opened again each time, because the file may have been rotated.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                with open(os.open(self._path, flags, 0o600), "a") as file:
                    file.write(line + "\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("Cannot write %s, so only the log has the audit: %s", self._path, error)
            self._is_failing = True
