"""Who takes part in a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.run_settings import RefusedError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS replicas (
    replica_id TEXT PRIMARY KEY, session TEXT NOT NULL, about TEXT NOT NULL,
    registrations INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS model (only INTEGER PRIMARY KEY CHECK (only = 1), rows TEXT NOT NULL);
"""

ModelRow = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of what is synchronised."""


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

    last_seen: float
    progress: dict[str, Any]
    is_over: bool = False


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
        self._clock = clock
        self._began = clock()
        self._lives: dict[str, Life] = {}
        self._losses: dict[str, dict[int, float]] = {}
        database.execute_schema(_SCHEMA)

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
            RefusedError: It has other versions, or another model.
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
            self._check_model(cursor, model)
            count = 1 if known is None else known[1] + (known[0] != session)
            cursor.execute(
                "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?)",
                (replica_id, session, json.dumps(dict(about)), count),
            )
        self._lives[replica_id] = Life(self._clock(), {"phase": "joining"})
        if known is None or known[0] != session:
            again = "" if count == 1 else f", for the {count}. time"
            self._journal.tell(
                f"replica group {replica_id} registered from {about.get('host')}{again}"
            )

    def _check_model(self, cursor: Any, model: Sequence[ModelRow]) -> None:
        rows = [[name, list(shape), dtype] for name, shape, dtype in sorted(model)]
        known = cursor.execute("SELECT rows FROM model").fetchone()
        if known is None:
            cursor.execute("INSERT INTO model VALUES (1, ?)", (json.dumps(rows),))
            return
        here = {name: (shape, dtype) for name, shape, dtype in rows}
        run = {name: (shape, dtype) for name, shape, dtype in json.loads(known[0])}
        for name in sorted(here.keys() | run.keys()):
            if here.get(name) != run.get(name):
                raise RefusedError(
                    f"another model: {name} is {_described(here.get(name))} here, and "
                    f"{_described(run.get(name))} in this run"
                )

    def heartbeat(self, replica_id: str, session: str, progress: Mapping[str, Any]) -> None:
        """A group is alive, and here it stands.

        Raises:
            OutdatedError: Another one has registered under its name.
        """
        self._check_session(replica_id, session)
        self._lives[replica_id] = Life(self._clock(), dict(progress))
        if progress.get("loss") is not None:
            losses = self._losses.setdefault(replica_id, {})
            losses[progress.get("inner_steps") or 0] = progress["loss"]
            if len(losses) > 4 * self.MAX_POINTS:
                self._losses[replica_id] = dict(sorted(losses.items())[::2])

    def leave(self, replica_id: str, session: str) -> None:
        """A group has ended.

        Raises:
            OutdatedError: Another one has registered under its name.
        """
        self._check_session(replica_id, session)
        life = self._lives.setdefault(replica_id, Life(self._clock(), {}))
        life.is_over = True
        life.progress["phase"] = "finished"
        self._journal.tell(f"replica group {replica_id} has left")

    def _check_session(self, replica_id: str, session: str) -> None:
        with self._database.transaction() as cursor:
            known = cursor.execute(
                "SELECT session FROM replicas WHERE replica_id = ?", (replica_id,)
            ).fetchone()
        if known is None or known[0] != session:
            raise OutdatedError(
                f"replica group {replica_id!r} is not registered with this session: register again"
            )

    def is_alive(self, replica_id: str) -> bool:
        """Whether it has been heard of in time; after a restart of this service, in that time."""
        life = self._lives.get(replica_id)
        if life is None:
            return self._clock() - self._began < self.heartbeat_timeout_s
        return not life.is_over and self._clock() - life.last_seen < self.heartbeat_timeout_s

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """Losses by inner steps of each group, no more points than a picture can show."""
        found = {}
        for replica_id, losses in self._losses.items():
            points = sorted(losses.items())
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
            seen = None if life is None else round(self._clock() - life.last_seen, 1)
            found.append(
                {"replica_id": replica_id, "registrations": registrations}
                | json.loads(about)
                | {"is_alive": self.is_alive(replica_id), "last_seen_s": seen}
                | ({} if life is None else life.progress)
            )
        return found


def _described(entry: tuple[list[int], str] | None) -> str:
    return "missing" if entry is None else f"{entry[1]} {tuple(entry[0])}"
