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
from composer_replication.coordinator.page import agreement_of
from composer_replication.util.curve import Curve

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
    def action(self, what: str, source: str | None) -> Iterator[None]:
        """A context that records whether its block was executed, or why it was refused.

        Args:
            what: What the request asks for, and who asks. It must not contain secrets.
            source: The address that it comes from.
        """
        try:
            yield
        except RejectedError as error:
            self.try_to_add(f"{what}, from {source}, is refused: {error}")
            raise
        self.try_to_add(f"{what}, from {source}")

    def try_to_add(self, text: str) -> None:
        """Add an event, if the disk allows it: the request goes on with a full disk."""
        try:
            self.add(text)
        except StorageError as error:  # the log has it, and the request has its own answer
            log.warning("That event is in the log alone: %s", error)


class History:
    """Keeps what heartbeats have reported, in memory: it never waits for the disk.

    Curves are thinned, so its size has a bound.
    """

    MAX_DIGESTS = 1000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._losses: defaultdict[str, Curve] = defaultdict(Curve)
        self._digests: dict[int, dict[str, str]] = {}

    def add(self, replica_id: str, progress: Mapping[str, Any]) -> None:
        """Add the progress of one heartbeat.

        Args:
            replica_id: The group.
            progress: Fields of ``Heartbeat``. Those that are missing say nothing.
        """
        with self._lock:
            if progress.get("loss") is not None:
                batch = progress.get("batch") or 0
                self._losses[replica_id].add(batch, (batch, progress["loss"]))
            if progress.get("global_digest") is not None:
                self._add_digest(
                    replica_id, progress.get("digest_step") or 0, progress["global_digest"]
                )

    def _add_digest(self, replica_id: str, step: int, digest: str) -> None:
        if self._digests.get(step, {}).get(replica_id, digest) != digest:
            # The run has resumed from before this step: what came after it is not comparable.
            self._digests = {s: sent for s, sent in self._digests.items() if s < step}
        self._digests.setdefault(step, {})[replica_id] = digest
        if len(self._digests) > self.MAX_DIGESTS:
            del self._digests[min(self._digests)]

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """The losses of each group, as rows of batch and loss, see ``Curve``.

        They are by batch, since a group that was restarted counts inner steps from 0.
        """
        with self._lock:
            return {id: curve.points for id, curve in self._losses.items()}

    def agreement(self) -> dict[str, Any] | None:
        """Whether the groups' parameters are equal, see ``agreement_of``."""
        with self._lock:
            return agreement_of(self._digests)
