"""Runs the coordinator and its lighthouse, in a process of their own or inside the launcher's."""

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict, Unpack

from composer_replication import __version__
from composer_replication.arguments import among, check_names, defaults_of, shows
from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S
from composer_replication.coordinator.api import Record, RunData, create_app
from composer_replication.coordinator.database import Database, RejectedError
from composer_replication.coordinator.events import Events
from composer_replication.coordinator.http_service import HttpService, Listener
from composer_replication.coordinator.page import PAGE_DATA
from composer_replication.coordinator.registry import Registry
from composer_replication.coordinator.streams import Streams
from composer_replication.coordinator.wire_types import RunInfo, digests_of
from composer_replication.replica.addresses import bracketed, is_loopback
from composer_replication.replica.lighthouse import (
    STRAGGLER_TIMEOUT_S,
    LastingServer,
    start_lighthouse,
)
from composer_replication.settings import DiLoCoSettings, SettingKeywords, differing
from composer_replication.util.connections import raise_file_limit
from composer_replication.util.fence import fence
from composer_replication.util.json_files import open_lock, replace_json

STATE = "coordinator.sqlite"
"""Name of the database in the state folder."""

LOCK = "coordinator.lock"
"""Name of a file in the state folder. The process that serves the folder holds a lock on it."""


class ServiceKeywords(TypedDict, total=False):
    """Where a coordinator and its lighthouse listen, whom they answer, and how long they wait."""

    bind: Annotated[str, "[::]:0"]
    """Address of the service, ``address:port``. The lighthouse uses the next port. With port 0 each
    uses a free one.
    """

    hostname: Annotated[str | None, None]
    """Name of this machine for the groups. None: the address of ``bind``; if that is every
    interface, the name under which a group has reached the service.
    """

    tokens: Annotated[Sequence[str], ()]
    """Accepted tokens. Empty: requests need none."""

    heartbeat_timeout_s: Annotated[float, HEARTBEAT_TIMEOUT_S]
    """Seconds of silence after which a group is dead."""

    straggler_timeout_s: Annotated[float, STRAGGLER_TIMEOUT_S]
    """Seconds that a quorum waits for a group that is alive and has not joined."""

    lighthouse_heartbeat_ms: Annotated[int, 5_000]
    """Milliseconds of silence after which the lighthouse drops a group."""

    ssl_certfile: Annotated[Path | None, None]
    """Certificate (PEM) with which to serve HTTPS. None: plain HTTP."""

    ssl_keyfile: Annotated[Path | None, None]
    """Private key of the certificate."""


class Coordinator:
    """A running coordinator. Close it with ``shutdown``.

    Args:
        settings: DiLoCo settings of the run.
        source: Where the settings come from, for people.
        num_replicas: Number of groups that a cold start waits for.
        min_replica_size: Fewest groups in a quorum that may commit.
        digest_every: The value of groups whose config does not name it.
        model_section: The config's ``model``, if it has one. Groups compare digests of its values
            with their own before they build the model.
        record: See ``RunData``.
        state_dir: Folder of the run's state, which is created if it does not exist.
        all_start: Whether all groups start together with this service, see ``store_settings``.

    Raises:
        ValueError: ``bind`` is not an address, the certificate cannot be used, another process
            serves the state folder, or the folder belongs to a run with other settings.
        OSError: The address cannot be listened at.
        StorageError: The state cannot be read or written.
    """

    @shows(ServiceKeywords)
    def __init__(
        self,
        settings: DiLoCoSettings,
        source: str,
        *,
        num_replicas: int,
        state_dir: Path,
        min_replica_size: int = 1,
        digest_every: int = 0,
        model_section: Mapping[str, Any] | None = None,
        record: Record | None = None,
        all_start: bool = False,
        **named: Unpack[ServiceKeywords],
    ) -> None:
        check_names(named, ServiceKeywords, "Coordinator")
        given = SimpleNamespace(**{**defaults_of(ServiceKeywords), **named})
        raise_file_limit()
        state_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:  # an error below closes what is open by then
            # Without the lock, a second coordinator on this folder would receive no heartbeats of
            # the first one's groups, count them as dead and close their streams.
            opened.enter_context(open_lock(state_dir, LOCK, "use another state folder"))
            database = opened.enter_context(closing(Database(state_dir / STATE)))
            events = Events(database)
            store_settings(database, events, settings, source, all_start)
            versions = {"composer_replication": __version__, "torchft": version("torchft-nightly")}
            registry = Registry(database, events, versions, given.heartbeat_timeout_s)
            listening = opened.enter_context(Listener(given.bind))
            lighthouse = _start_lighthouse_beside(
                given.bind, given.straggler_timeout_s, given.lighthouse_heartbeat_ms
            )
            opened.callback(lighthouse.shutdown)
            host, is_guessed = _reachable_as(listening.host, given.hostname)
            port = lighthouse.address().rpartition(":")[2]
            self.lighthouse_addr = f"http://{host}:{port}"
            scheme = "https" if given.ssl_certfile else "http"
            self.address = f"{scheme}://{host}:{listening.port}"
            info = RunInfo(
                settings=settings,
                settings_source=source,
                num_replicas=num_replicas,
                min_replicas=min_replica_size,
                lighthouse_addr=self.lighthouse_addr,
                heartbeat_timeout_s=given.heartbeat_timeout_s,
                version=__version__,
                torchft=versions["torchft"],
                digest_every=digest_every,
                model_section=digests_of(model_section or {}),
            )
            self._run = RunData(
                info=info,
                registry=registry,
                streams=Streams(database, registry, events),
                events=events,
                is_host_guessed=is_guessed,
                record=record,
            )
            app = create_app(
                self._run,
                tokens=given.tokens,
                hosts=None if given.tokens else _loopback_names(listening.host, given.hostname),
            )

            async def keep_up() -> None:
                with fence("whether the lighthouse answers"):
                    await asyncio.to_thread(lighthouse.restart_if_it_refuses, "The lighthouse")

            self._http = HttpService(app, listening, keep_up, given.ssl_certfile, given.ssl_keyfile)
            opened.callback(self._http.close)
            self._open = opened.pop_all()
        self._state_dir = state_dir

    @property
    def is_serving(self) -> bool:
        """Whether the service is running."""
        return self._http.is_serving

    def group_has_ended(self, replica_id: int | str) -> None:
        """Free the name of a group whose processes have ended, so that it can restart at once."""
        self._run.registry.end(str(replica_id))

    def shutdown(self) -> None:
        """Stop the service and the lighthouse. What the service has answered is on the disk.

        What the page showed last is written to ``page.json`` in the state folder, for the report.
        """
        with self._open, fence("page.json, from which report.html is made"):
            replace_json(self._state_dir / PAGE_DATA, self._run.shown())


def _start_lighthouse_beside(
    bind: str,
    straggler_timeout_s: float,
    heartbeat_timeout_ms: int,
) -> LastingServer:
    """Start the lighthouse on the next port, where groups find it again after a restart."""
    address, _, port = bind.rpartition(":")
    try:
        return LastingServer(
            lambda where: start_lighthouse(
                bind=where,
                join_timeout_ms=round(1000 * straggler_timeout_s),
                heartbeat_timeout_ms=heartbeat_timeout_ms,
            ),
            f"{address}:{int(port) + 1 if int(port) else 0}",
        )
    except OSError as error:
        raise OSError(
            f"--bind {bind}: {error}. The lighthouse uses the next port: choose another one"
        ) from error


def _reachable_as(address: str, hostname: str | None) -> tuple[str, bool]:
    """The host name for groups, and whether it is a guess, namely the machine's own name.

    It is a guess if the service listens on every interface and no ``hostname`` was given.
    """
    host = hostname or address
    is_guessed = host in ("::", "0.0.0.0")
    return (socket.gethostname() if is_guessed else bracketed(host)), is_guessed


def _loopback_names(address: str, hostname: str | None) -> list[str] | None:
    """Host names of a service that only this machine reaches; None if other machines reach it."""
    return (
        ["localhost", "127.0.0.1", "[::1]", (hostname or address).lower()]
        if is_loopback(address)
        else None
    )


def store_settings(
    database: Database,
    events: Events,
    settings: DiLoCoSettings,
    source: str,
    all_start: bool = False,
) -> None:
    """Keep the settings that all replica groups of a run have, from its start to its end.

    Args:
        database: Keeps them.
        events: Receives what has changed since this state folder was last served.
        settings: The settings of the config.
        source: Where they come from, for people.
        all_start: Whether all replica groups start with this service, so that settings may have
            changed since it was last served. Otherwise groups may be training with those of before.

    Raises:
        RejectedError: Settings have changed, and groups may be training.
    """
    now = _as_stored(settings)
    with database.transaction() as cursor:
        row = cursor.execute("SELECT settings FROM settings").fetchone()
        # Another version has stored it: without those that are gone, with the defaults of new ones.
        defaults = _as_stored(DiLoCoSettings())
        before = now if row is None else defaults | among(json.loads(row[0]), SettingKeywords)
        changes = ", ".join(
            f"{name} {before[name]!r} before, {now[name]!r} now" for name in differing(before, now)
        )
        if changes and not all_start:
            raise RejectedError(
                f"the state folder belongs to a run with other settings ({changes}), and groups in "
                "training keep those with which they started. Use the settings of before; or stop "
                "all groups, and start this coordinator with --new-settings before they resume; "
                "or use another state folder for another run"
            )
        new = json.dumps(now), source
        cursor.execute("INSERT OR REPLACE INTO settings VALUES (1, ?, ?)", new)
        if changes:
            events.add(f"new settings from {source}: {changes}")


def _as_stored(settings: DiLoCoSettings) -> dict[str, Any]:
    """The settings as they are read from the database: a tuple is a list there."""
    return json.loads(json.dumps(asdict(settings)))
