"""The coordinator as a process, or inside the launcher's: a torchft lighthouse and the service."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication import __version__
from composer_replication.coordinator.api import create_app
from composer_replication.coordinator.database import Database
from composer_replication.coordinator.http_service import HttpService
from composer_replication.coordinator.journal import Journal
from composer_replication.coordinator.registry import Registry, Versions
from composer_replication.coordinator.run_settings import RunSettings
from composer_replication.coordinator.streams import Streams
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.lighthouse import STRAGGLER_TIMEOUT_S, start_lighthouse

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

HEARTBEAT_TIMEOUT_S = 3.0
"""After how long a silent replica group is dead to the coordinator."""

STATE = "coordinator.sqlite"
"""The database in the state folder."""


class Coordinator:
    """A running coordinator; close it with ``shutdown``.

    Args:
        settings: Of the run.
        source: Where they come from, for people.
        num_replicas: How many groups a cold start waits for.
        min_replicas: Fewest groups in a quorum that may commit.
        state_dir: Where the state is kept; it is made if it is not there.
        bind: Where the service listens, ``address:port``, and on the next port the lighthouse; port
            0 is a free one for each.
        hostname: How groups reach this machine. None: its host name.
        tokens: Every request has to bear one of them; none for no such check.
        tls_dir: The folder of certificates with which the service speaks TLS. None: it does not.
        heartbeat_timeout_s: After how long a silent group is dead.
        straggler_timeout_s: How long a quorum waits for a group that is alive and not there yet.
        lighthouse_heartbeat_ms: After how long without a heartbeat the lighthouse drops a group.
        all_start: Whether all groups start together with it, see ``RunSettings``.
        model_section: The config's ``model``, which groups compare with their own before they build
            it.

    Raises:
        ValueError: ``bind`` is no address, or the state is of a run with other settings.
        OSError: Nothing can listen there.
        StorageError: The state cannot be read or written.
    """

    def __init__(
        self,
        settings: DiLoCoSettings,
        source: str,
        *,
        num_replicas: int,
        state_dir: Path,
        min_replicas: int = 1,
        bind: str = "[::]:0",
        hostname: str | None = None,
        tokens: Sequence[str] = (),
        tls_dir: str | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
        lighthouse_heartbeat_ms: int = 5_000,
        all_start: bool = False,
        model_section: Mapping[str, Any] | None = None,
    ) -> None:
        self._http = HttpService(bind, tls_dir)
        state_dir.mkdir(parents=True, exist_ok=True)
        self._database = Database(state_dir / STATE)
        try:
            journal = Journal(self._database)
            run_settings = RunSettings(self._database, journal, settings, source, all_start)
            versions = Versions(__version__, version("torchft-nightly"))
            registry = Registry(self._database, journal, versions, heartbeat_timeout_s)
            streams = Streams(self._database, registry, journal)
            self._lighthouse = _start_lighthouse_beside(
                bind, straggler_timeout_s, lighthouse_heartbeat_ms
            )
        except BaseException:
            self._database.close()
            self._http.close()
            raise
        self._registry = registry
        address = bind.rpartition(":")[0]
        lighthouse_port = self._lighthouse.address().rpartition(":")[2]
        host = hostname or _reachable_as(address)
        self.lighthouse_addr = f"http://{host}:{lighthouse_port}"
        scheme = "http" if tls_dir is None else "https"
        self.address = f"{scheme}://{host}:{self._http.port}"
        app = create_app(
            run_settings,
            registry,
            streams,
            journal,
            tokens=tokens,
            hosts=None if tokens else _loopback_names(bind, hostname),
            lighthouse_addr=self.lighthouse_addr,
            num_replicas=num_replicas,
            min_replicas=min_replicas,
            model_section=model_section,
        )
        try:
            self._http.start(app)
        except BaseException:
            self.shutdown()
            raise

    @property
    def is_serving(self) -> bool:
        """Whether the service answers."""
        return self._http.is_serving

    def group_has_ended(self, replica_id: int | str) -> None:
        """A group's processes are gone: it may be started again without a wait."""
        self._registry.end(str(replica_id))

    def shutdown(self) -> None:
        """End the service and the lighthouse; all that was answered is on the disk."""
        self._http.close()
        self._database.close()
        self._lighthouse.shutdown()


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


def _reachable_as(address: str) -> str:
    """How groups reach what listens at an address: every interface goes by the machine's name."""
    host = address.strip("[]")
    if host in ("::", "0.0.0.0"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


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
