"""The coordinator as a process, or inside the launcher's: a torchft lighthouse and the service."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication import __version__
from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S
from composer_replication.coordinator.api import RunFacts, create_app
from composer_replication.coordinator.audit import AUDIT, Audit
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.http_service import HttpService, TlsFiles
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import Registry, Versions
from composer_replication.coordinator.run_settings import RunSettings
from composer_replication.coordinator.strangers import Strangers
from composer_replication.coordinator.streams import Streams
from composer_replication.diloco.arguments import takes
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.addresses import bracketed
from composer_replication.replica.folder_lock import open_lock
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S, start_lighthouse

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

STATE = "coordinator.sqlite"
"""The database in the state folder."""

LOCK = "coordinator.lock"
"""Locked by the process that serves the state folder; it has its number."""


@dataclass(frozen=True)
class CoordinatorArguments(RunFacts):
    """All arguments of ``Coordinator``.

    Args:
        settings: Of the run.
        source: Where they come from, for people.
        state_dir: Where the state is kept; it is made if it is not there.
        bind: Where the service listens, ``address:port``, and on the next port the lighthouse; port
            0 is a free one for each.
        hostname: How groups reach this machine. None: its host name.
        tokens: Every request has to bear one of them; none for no such check.
        heartbeat_timeout_s: After how long a silent group is dead.
        straggler_timeout_s: How long a quorum waits for a group that is alive and not there yet.
        lighthouse_heartbeat_ms: After how long without a heartbeat the lighthouse drops a group.
        all_start: Whether all groups start together with it, see ``RunSettings``.
        tls: The certificate of the service; None for plain HTTP.
    """

    settings: DiLoCoSettings
    source: str
    _: KW_ONLY
    state_dir: Path
    bind: str = "[::]:0"
    hostname: str | None = None
    tokens: Sequence[str] = ()
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    straggler_timeout_s: float = STRAGGLER_TIMEOUT_S
    lighthouse_heartbeat_ms: int = 5_000
    all_start: bool = False
    tls: TlsFiles | None = None


class Coordinator:
    """A running coordinator; close it with ``shutdown``.

    Its arguments are those of :class:`CoordinatorArguments`.

    Raises:
        ValueError: ``bind`` is no address, the certificate cannot be used, another process serves
            the state folder, or the state is of a run with other settings.
        OSError: Nothing can listen there.
        StorageError: The state cannot be read or written.
    """

    @takes(CoordinatorArguments)
    def __init__(self, *run: Any, **options: Any) -> None:
        own = CoordinatorArguments(*run, **options)
        own.state_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:  # an error here closes what has been opened
            # Two on one folder would each take the other's groups for dead and end their streams.
            opened.callback(os.close, open_lock(own.state_dir, LOCK, "use another state folder"))
            database = opened.enter_context(closing(Database(own.state_dir / STATE)))
            journal = Journal(database)
            settings = RunSettings(database, journal, own.settings, own.source, own.all_start)
            versions = Versions(__version__, version("torchft-nightly"))
            registry = Registry(database, journal, versions, own.heartbeat_timeout_s)
            self._http = opened.enter_context(closing(HttpService(own.bind, own.tls)))
            lighthouse = _start_lighthouse_beside(
                own.bind, own.straggler_timeout_s, own.lighthouse_heartbeat_ms
            )
            opened.callback(lighthouse.shutdown)
            host = _reachable_as(own.bind, own.hostname)
            port = lighthouse.address().rpartition(":")[2]
            self.lighthouse_addr = f"http://{host}:{port}"
            self.address = f"{'https' if own.tls else 'http'}://{host}:{self._http.port}"
            own_addr = f"http://{_own_address(own.bind)}:{port}"
            strangers = opened.enter_context(closing(Strangers(own_addr, registry, journal)))
            app = create_app(
                settings,
                registry,
                Streams(database, registry, journal),
                journal,
                audit=Audit(own.state_dir / AUDIT),
                strangers=strangers,
                tokens=own.tokens,
                hosts=None if own.tokens else _loopback_names(own.bind, own.hostname),
                lighthouse_addr=self.lighthouse_addr,
                facts=own,
            )
            strangers.start()
            self._http.start(app)
            self._open = opened.pop_all()
        self._registry = registry

    @property
    def is_serving(self) -> bool:
        """Whether the service answers."""
        return self._http.is_serving

    def group_has_ended(self, replica_id: int | str) -> None:
        """A group's processes are gone: it may be started again without a wait."""
        self._registry.end(str(replica_id))

    def shutdown(self) -> None:
        """End the service and the lighthouse; all that was answered is on the disk."""
        self._open.close()


def _start_lighthouse_beside(
    bind: str, straggler_timeout_s: float, heartbeat_timeout_ms: int
) -> LighthouseServer:
    """On the next port, so that groups find it again after a restart of this process."""
    address, _, port = bind.rpartition(":")
    try:
        return start_lighthouse(
            bind=f"{address}:{int(port) + 1 if int(port) else 0}",
            min_replicas=1,
            join_timeout_ms=round(1000 * straggler_timeout_s),
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
    except OSError as error:
        raise OSError(
            f"--bind {bind}: {error}. The lighthouse takes the port after it: choose another"
        ) from error


def _reachable_as(bind: str, hostname: str | None) -> str:
    """How groups reach what listens there: every interface goes by the machine's name."""
    if hostname is not None:
        return bracketed(hostname)
    host = bind.rpartition(":")[0].strip("[]")
    if host in ("::", "0.0.0.0"):
        return socket.gethostname()
    return bracketed(host)


def _own_address(bind: str) -> str:
    """How this process reaches what listens there."""
    host = bind.rpartition(":")[0].strip("[]")
    return "127.0.0.1" if host in ("::", "0.0.0.0") else bracketed(host)


def _loopback_names(bind: str, hostname: str | None) -> list[str] | None:
    """The names of a service that only this machine reaches; None if others do."""
    return (
        ["localhost", "127.0.0.1", "[::1]", *filter(None, [hostname])]
        if is_loopback(bind)
        else None
    )


def is_loopback(bind: str) -> bool:
    """Whether only this machine reaches what listens at ``address:port``."""
    host = bind.rpartition(":")[0].strip("[]")
    return host == "localhost" or host == "::1" or host.startswith("127.")
