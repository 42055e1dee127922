"""The newest events of a run, for the status page."""

from __future__ import annotations

import logging
import time
from typing import Any

from composer_replication.coordinator.database import Database

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, text TEXT NOT NULL
)
"""


class Journal:
    """Keeps the newest events of a run.

    Args:
        database: Holds the events.
    """

    MAX_EVENTS = 50

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute_schema(_SCHEMA)

    def add(self, text: str) -> None:
        """Add an event that people want to know of, and log it."""
        log.info("%s%s", text[0].upper(), text[1:])
        with self._database.transaction() as cursor:
            cursor.execute("INSERT INTO events (time, text) VALUES (?, ?)", (time.time(), text))
            cursor.execute(
                "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?",
                (self.MAX_EVENTS,),
            )

    def events(self) -> list[dict[str, Any]]:
        """Return the newest events, oldest first: ``time`` in seconds since 1970, and ``text``."""
        with self._database.transaction() as cursor:
            rows = cursor.execute("SELECT time, text FROM events ORDER BY number").fetchall()
        return [{"time": at, "text": text} for at, text in rows]
