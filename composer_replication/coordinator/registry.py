"""Who takes part in a run."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.coordinator import run_model
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.run_model import (
    ModelRow,
    check_model,
    find_fingerprint,
)
from composer_replication.coordinator.run_settings import RefusedError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replicas (
    replica_id TEXT PRIMARY KEY, session TEXT NOT NULL, about TEXT NOT NULL,
    registrations INTEGER NOT NULL
);
"""


class DuplicateError(RefusedError):
    """A living replica group has this name already."""


class OutdatedError(RefusedError):
    """It speaks for a session that has been replaced or has ended."""


@dataclass(frozen=True)
class Versions:
    """What a replica group runs on."""

    composer_replication: str
    torchft: str


@dataclass
class Life:
    """What is known of a replica group that need not survive the coordinator."""

    registered_at: float
    last_seen: float
    progress: dict[str, Any]
    left_at: float | None = None


class Registry:
    """The replica groups of a run, and the model that they train.

    Args:
        database: Where what must last is kept.
        journal: Told who comes and goes.
        versions: Of this process; groups with others are refused.
        heartbeat_timeout_s: After how long a silent group is dead.
        clock: For tests.
    """

    MAX_POINTS = 500

    def __init__(
        self,
        database: Database,
        journal: Journal,
        versions: Versions,
        heartbeat_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._journal = journal
        self.versions = versions
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.clock = clock
        self._began = clock()
        # What heartbeats need is in memory, under a lock that nobody holds while the disk works:
        # while a transaction waits for a slow disk, all groups would look dead.
        self._lock = threading.Lock()
        self._lives: dict[str, Life] = {}
        self._losses: dict[str, dict[int, float]] = {}
        database.execute_schema(_SCHEMA + run_model.SCHEMA)
        with database.transaction() as cursor:
            rows = cursor.execute("SELECT replica_id, session FROM replicas").fetchall()
        self._sessions: dict[str, str] = dict(rows)

    def register(
        self,
        replica_id: str,
        session: str,
        about: Mapping[str, Any],
        versions: Versions,
        model: Sequence[ModelRow],
    ) -> None:
        """Let a replica group take part; the first one says what the model is.

        Raises:
            DuplicateError: A living group has its name.
            RefusedError: It has other versions, another model, or another number of ranks.
        """
        for name, own in asdict(self.versions).items():
            theirs = getattr(versions, name)
            if theirs != own:
                raise RefusedError(
                    f"{name} {theirs} here, and {own} in this run: install the same version"
                )
        with self._database.transaction() as cursor:
            known = cursor.execute(
                "SELECT session, registrations FROM replicas WHERE replica_id = ?", (replica_id,)
            ).fetchone()
            if known is not None and known[0] != session and self.is_alive(replica_id):
                raise DuplicateError(
                    f"a replica group {replica_id!r} is alive: give each group a REPLICA_GROUP_ID "
                    "of its own, or end that one"
                )
            self._check_ranks(cursor, replica_id, about.get("world_size"))
            check_model(cursor, model)
            count = 1 if known is None else known[1] + (known[0] != session)
            cursor.execute(
                "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?)",
                (replica_id, session, json.dumps(dict(about)), count),
            )
        is_new = known is None or known[0] != session
        with self._lock:  # from now on the life before this one is over
            since = self.clock() if is_new else self._registered_at(replica_id)
            self._sessions[replica_id] = session
            self._lives[replica_id] = Life(since, self.clock(), {"phase": "joining"})
        if is_new:
            again = "" if count == 1 else f", for the {count}. time"
            self._journal.tell(
                f"replica group {replica_id} registered from {about.get('host')}{again}"
            )

    def _check_ranks(self, cursor: sqlite3.Cursor, replica_id: str, ranks: int | None) -> None:
        rows = cursor.execute("SELECT replica_id, about FROM replicas").fetchall()
        for other, text in rows:
            theirs = json.loads(text).get("world_size")
            # One that this process has not heard of may have ended before its restart.
            is_known = other in self._lives and self.is_alive(other)
            if other != replica_id and is_known and theirs != ranks:
                raise RefusedError(
                    f"replica group {replica_id!r} has a world size of {ranks}, and replica group "
                    f"{other!r} of this run one of {theirs}: start every group with the same "
                    "number of ranks"
                )

    def model_fingerprint(self) -> str | None:
        """``fingerprint_of`` the model of the run; None before the first group has registered."""
        with self._database.transaction() as cursor:
            return find_fingerprint(cursor)

    def heartbeat(self, replica_id: str, session: str, progress: Mapping[str, Any]) -> None:
        """A group is alive, and here it stands. Never waits for the disk.

        Raises:
            OutdatedError: Another one has registered under its name.
        """
        with self._lock:
            self._check_session(replica_id, session)
            since = self._registered_at(replica_id)
            self._lives[replica_id] = Life(since, self.clock(), dict(progress))
            if progress.get("loss") is not None:
                losses = self._losses.setdefault(replica_id, {})
                losses[progress.get("batch") or 0] = progress["loss"]
                if len(losses) > 4 * self.MAX_POINTS:
                    self._losses[replica_id] = dict(sorted(losses.items())[::2])

    def end(self, replica_id: str) -> None:
        """Whoever started a group says that its processes are gone: its name is free at once."""
        with self._lock:
            life = self._lives.get(replica_id)
            if life is not None:
                life.left_at = self.clock()

    def leave(self, replica_id: str, session: str) -> None:
        """A group has ended.

        Raises:
            OutdatedError: Another one has registered under its name.
        """
        with self._lock:
            self._check_session(replica_id, session)
            life = self._lives.setdefault(replica_id, Life(self._began, self.clock(), {}))
            life.left_at = self.clock()
            life.progress["phase"] = "finished"
        self._journal.tell(f"replica group {replica_id} has left")

    def names(self) -> frozenset[str]:
        """All groups that ever registered."""
        with self._lock:
            return frozenset(self._sessions)

    def _check_session(self, replica_id: str, session: str) -> None:
        if self._sessions.get(replica_id) != session:
            raise OutdatedError(
                f"replica group {replica_id!r} is not registered with this session: register again"
            )

    def is_alive(self, replica_id: str) -> bool:
        """Whether it has been heard of in time; after a restart of this service, in that time."""
        life = self._lives.get(replica_id)
        if life is None:
            return self.clock() - self._began < self.heartbeat_timeout_s
        return life.left_at is None and self.clock() - life.last_seen < self.heartbeat_timeout_s

    def death_of(self, replica_id: str, session: str) -> float | None:
        """When a life of a group was over, by ``clock``; None if it may go on.

        What this process has not seen itself was over at the latest when it began.
        """
        current = self._sessions.get(replica_id)
        if current not in (None, session):
            return self._registered_at(replica_id)
        life = self._lives.get(replica_id)
        if life is not None and life.left_at is not None:
            return life.left_at
        if self.is_alive(replica_id):
            return None
        return (self._began if life is None else life.last_seen) + self.heartbeat_timeout_s

    def _registered_at(self, replica_id: str) -> float:
        life = self._lives.get(replica_id)
        return self._began if life is None else life.registered_at

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """Losses of each group by batches, no more points than a picture can show.

        By batches and not inner steps: a group that came back counts those from 0.
        """
        with self._lock:
            copies = {
                replica_id: list(losses.items()) for replica_id, losses in self._losses.items()
            }
        found = {}
        for replica_id, points in copies.items():
            points.sort()
            every = 1 + len(points) // self.MAX_POINTS
            found[replica_id] = points[(len(points) - 1) % every :: every]  # the newest is in it
        return found

    def replicas(self) -> list[dict[str, Any]]:
        """All groups that ever registered, for people."""
        with self._database.transaction() as cursor:
            rows = cursor.execute(
                "SELECT replica_id, about, registrations FROM replicas ORDER BY replica_id"
            ).fetchall()
        found = []
        for replica_id, about, registrations in rows:
            life = self._lives.get(replica_id)
            seen = None if life is None else round(self.clock() - life.last_seen, 1)
            found.append(
                {"replica_id": replica_id, "registrations": registrations}
                | json.loads(about)
                | {"is_alive": self.is_alive(replica_id), "last_seen_s": seen}
                | ({} if life is None else life.progress)
            )
        return found
