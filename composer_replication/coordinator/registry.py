"""The replica groups of a run: who is registered, who is alive, and what each one reports."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from composer_replication.coordinator.database import Database, RejectedError
from composer_replication.coordinator.events import Events, Heartbeats
from composer_replication.settings import describe_difference


class DuplicateError(RejectedError):
    """A live replica group has this name already."""

    status = 409


class OutdatedError(RejectedError):
    """The request bears a session that was replaced or has ended."""

    status = 410


@dataclass
class Incarnation:
    """One incarnation of a replica group, from a registration to its end. It is in memory only.

    Attributes:
        session: Its random name.
        registered_at: When it registered, by the registry's clock; when this service started, if it
            registered before.
        last_seen: When its last heartbeat came, by the same clock.
        progress: What its last heartbeat reported; None if none has come since this service began.
        left_at: When it left or its processes ended; None before.
    """

    session: str
    registered_at: float
    last_seen: float
    progress: Mapping[str, Any] | None = None
    left_at: float | None = None


class End(NamedTuple):
    """The end of an incarnation.

    Attributes:
        at: When it was, by the registry's clock. An end that this process has not seen counts as
            the latest time at which it can have happened.
        is_certain: Whether it has left or was replaced. One that is only silent may come back.
    """

    at: float
    is_certain: bool = True


class Registry:
    """The replica groups of a run, and the model that they train.

    Args:
        database: Holds what must survive this process.
        events: Receives registrations and departures.
        versions: Versions of this process. Groups with others are rejected.
        heartbeat_timeout_s: Seconds of silence after which a group is dead.
        clock: Returns seconds; tests replace it.

    Attributes:
        heartbeats: What they have reported.
    """

    def __init__(
        self,
        database: Database,
        events: Events,
        versions: Mapping[str, str],
        heartbeat_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._events = events
        self.versions = versions
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.clock = clock
        began = clock()
        self._tensors: Mapping[str, str] = {}  # of the run's model, once a group has registered
        self.heartbeats = Heartbeats()
        rows = database.read("SELECT replica_id, session FROM replicas")
        self._incarnations = {id: Incarnation(session, began, began) for id, session in rows}
        self._unknown = Incarnation("", began, began, left_at=began)

    def register(
        self,
        replica_id: str,
        session: str,
        *,
        model: str,
        tensors: Mapping[str, str],
        host: str,
        world_size: int,
        **versions: str,
    ) -> None:
        """Register a replica group. The first group determines the model of the run.

        Args:
            replica_id: Name of the group.
            session: Random name of the incarnation. A repeated call with the same one changes
                nothing.
            model: Fingerprint of the tensors that it synchronizes.
            tensors: Their shapes and dtypes by name, for the message.
            host: Where the group runs.
            world_size: Its ranks.
            **versions: Versions that the group runs on.

        Raises:
            DuplicateError: A live group has the name.
            RejectedError: The group has other versions or another model.
        """
        for name, own in self.versions.items():
            if (theirs := versions[name]) != own:
                raise RejectedError(
                    f"this group has {name} {theirs}, the run has {own}: install the same version"
                )
        with self._database.transaction() as cursor:  # one registration at a time
            known = self._of(replica_id)
            is_new = known.session != session
            if is_new and self.is_alive(replica_id):
                raise DuplicateError(
                    f"a replica group {replica_id!r} is alive: give each group a REPLICA_GROUP_ID "
                    "of its own, or end that one"
                )
            cursor.execute("INSERT OR IGNORE INTO model_fingerprint VALUES (1, ?)", (model,))
            (its,) = cursor.execute("SELECT fingerprint FROM model_fingerprint").fetchone()
            if model != its:
                is_known = self._tensors not in ({}, tensors)
                values = (tensors, self._tensors) if is_known else (model, its)
                what = describe_difference("model", *values)
                raise RejectedError(f"another model: {what}. Use the run's model config")
            cursor.execute(
                "INSERT INTO replicas VALUES (?, ?, ?, 1) ON CONFLICT (replica_id) DO UPDATE SET"
                " registrations = registrations + (session != excluded.session),"
                " session = excluded.session, about = excluded.about",
                (replica_id, session, json.dumps({"host": host, "world_size": world_size})),
            )
        self._tensors = tensors
        now = self.clock()
        since = now if is_new else known.registered_at
        # From here on requests of the previous session are rejected.
        self._incarnations[replica_id] = Incarnation(session, since, now, {"phase": "joining"})

    def heartbeat(self, replica_id: str, session: str, progress: Mapping[str, Any]) -> None:
        """Record that a group is alive, and its heartbeat's fields. It never waits for the disk.

        Raises:
            OutdatedError: Another session has registered under the name.
        """
        # Without the database's lock, for which it would wait while the disk is slow, until all
        # groups looked dead. A registration that comes meanwhile replaces the whole object.
        incarnation = self._registered(replica_id, session)
        incarnation.last_seen = self.clock()
        incarnation.progress = progress
        incarnation.left_at = None
        self.heartbeats.add(replica_id, progress)

    def end(self, replica_id: str) -> None:
        """Record that a group's processes have ended, so that its name is free at once.

        The caller is the launcher that started the group.
        """
        if replica_id in self._incarnations:
            self._incarnations[replica_id].left_at = self.clock()

    def leave(self, replica_id: str, session: str) -> None:
        """Record that a group has finished.

        Raises:
            OutdatedError: Another session has registered under the name.
        """
        incarnation = self._registered(replica_id, session)
        incarnation.left_at = self.clock()
        incarnation.progress = {**(incarnation.progress or {}), "phase": "finished"}
        self._events.add(f"replica group {replica_id} has left")

    def _registered(self, replica_id: str, session: str) -> Incarnation:
        incarnation = self._of(replica_id)
        if incarnation.session != session:
            raise OutdatedError(
                f"replica group {replica_id!r} is not registered with this session: register again"
            )
        return incarnation

    def _of(self, replica_id: str) -> Incarnation:
        return self._incarnations.get(replica_id, self._unknown)

    def is_alive(self, replica_id: str) -> bool:
        """Whether a group's last heartbeat is recent enough.

        Until this service itself is older than the timeout, groups that it has not heard of count
        as alive.
        """
        incarnation = self._of(replica_id)
        is_silent = self.clock() - incarnation.last_seen >= self.heartbeat_timeout_s
        return incarnation.left_at is None and not is_silent

    def end_of(self, replica_id: str, session: str) -> End | None:
        """When an incarnation of a group ended; None if it may be alive.

        Args:
            replica_id: Name of the group.
            session: The session of the incarnation.
        """
        incarnation = self._of(replica_id)
        if incarnation.session != session:
            return End(incarnation.registered_at)
        if incarnation.left_at is not None:
            return End(incarnation.left_at)
        if self.is_alive(replica_id):
            return None
        return End(incarnation.last_seen + self.heartbeat_timeout_s, is_certain=False)

    def replicas(self) -> list[dict[str, Any]]:
        """All groups that ever registered, as the status page shows them."""
        rows = self._database.read(
            "SELECT replica_id, about, registrations FROM replicas ORDER BY replica_id"
        )
        groups = []
        for replica_id, about, registrations in rows:
            incarnation = self._of(replica_id)
            progress = incarnation.progress
            seen = None if progress is None else round(self.clock() - incarnation.last_seen, 1)
            groups.append(
                {"replica_id": replica_id, "registrations": registrations}
                | json.loads(about)
                | {"is_alive": self.is_alive(replica_id), "last_seen_s": seen}
                | (progress or {})
            )
        return groups
