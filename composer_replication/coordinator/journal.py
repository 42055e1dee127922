"""What has happened in a run, for the people who watch it."""

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
    """The last events of a run.

    Args:
        database: Where they are kept.
    """

    MAX_EVENTS = 50

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute_schema(_SCHEMA)

    def tell(self, text: str) -> None:
        """Take note of something that people want to know, and log it."""
        log.info("%s%s", text[0].upper(), text[1:])
        with self._database.transaction() as cursor:
            cursor.execute("INSERT INTO events (time, text) VALUES (?, ?)", (time.time(), text))
            cursor.execute(
                "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?",
                (self.MAX_EVENTS,),
            )

    def events(self) -> list[dict[str, Any]]:
        """The last ones, oldest first: ``time`` in seconds since 1970, ``text``."""
        with self._database.transaction() as cursor:
            rows = cursor.execute("SELECT time, text FROM events ORDER BY number").fetchall()
        return [{"time": at, "text": text} for at, text in rows]
