"""What has happened in a run: its events, and what the groups' heartbeats have said over time."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from composer_replication.coordinator.database import Database, RejectedError, StorageError
from composer_replication.util.curves import Course, agreement_of

log = logging.getLogger(__name__)


class Events:
    """The table of a run's events: who came and went, who was refused, from which address.

    Each event is logged too. Of a long run the newest events are kept.

    Args:
        database: Holds the table.
    """

    KEPT = 10_000
    SHOWN = 50
    """Newest events on the page."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, text: str) -> None:
        """Add an event that people want to know of, and log it."""
        log.info("%s%s", text[0].upper(), text[1:])
        with self._database.transaction() as cursor:
            cursor.execute("INSERT INTO events (time, text) VALUES (?, ?)", (time.time(), text))
            cursor.execute(
                "DELETE FROM events WHERE number <= (SELECT max(number) FROM events) - ?",
                (self.KEPT,),
            )

    def newest(self) -> list[dict[str, Any]]:
        """Return the newest events, oldest first: ``time`` in seconds since 1970, and ``text``."""
        newest = "SELECT time, text FROM events ORDER BY number DESC LIMIT ?"
        rows = self._database.read(newest, self.SHOWN)
        return [{"time": at, "text": text} for at, text in reversed(rows)]

    @contextmanager
    def refusals(self, whom: str) -> Iterator[None]:
        """A context that records why its block was refused.

        Args:
            whom: Who or what is refused. It must not contain secrets.
        """
        try:
            yield
        except RejectedError as error:
            self.try_to_add(f"{whom} was refused: {error}")
            raise

    def try_to_add(self, text: str) -> None:
        """Add an event, if the disk allows it: the request goes on with a full disk."""
        try:
            self.add(text)
        except StorageError as error:  # the log has it, and the request has its own answer
            log.warning("That event is in the log alone: %s", error)


class Heartbeats:
    """Keeps what heartbeats have reported, in memory: it never waits for the disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._courses: defaultdict[str, Course] = defaultdict(Course)

    def add(self, replica_id: str, progress: Mapping[str, Any]) -> None:
        """Add the progress of one heartbeat.

        Args:
            replica_id: The group.
            progress: Fields of ``Heartbeat``. Those that are missing say nothing.
        """
        with self._lock:
            course = self._courses[replica_id]
            if "loss" in progress:
                course.losses.add(progress.get("batch", 0), progress["loss"])
            if "global_digest" not in progress:
                return
            step, digest = progress.get("digest_step", 0), progress["global_digest"]
            if course.digests.get(step, digest) != digest:
                # The run has resumed from before this step: others will report it again too.
                for each in self._courses.values():
                    each.forget_digests(step)
            course.add_digest(step, digest)

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """The losses of each group that has reported any, as rows of batch and loss."""
        with self._lock:
            return {
                id: [*course.losses.points]
                for id, course in self._courses.items()
                if course.losses.points
            }

    def agreement(self) -> dict[str, Any] | None:
        """Whether the groups' parameters are equal, see ``agreement_of``."""
        with self._lock:
            return agreement_of(self._courses)
