"""The coordinator as a process, or inside the launcher's: a torchft lighthouse and the service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from composer_replication import __version__
from composer_replication.coordinator.api import create_app
from composer_replication.coordinator.database import Database
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
        token: What every request has to bear; None for no such check.
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
        token: str | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        straggler_timeout_s: float = STRAGGLER_TIMEOUT_S,
        lighthouse_heartbeat_ms: int = 5_000,
        all_start: bool = False,
        model_section: Mapping[str, Any] | None = None,
    ) -> None:
        self._socket = _listen(bind)
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
            self._socket.close()
            raise
        self._registry = registry
        address = bind.rpartition(":")[0]
        lighthouse_port = self._lighthouse.address().rpartition(":")[2]
        host = hostname or _reachable_as(address)
        self.lighthouse_addr = f"http://{host}:{lighthouse_port}"
        self.address = f"http://{host}:{self._socket.getsockname()[1]}"
        app = create_app(
            run_settings,
            registry,
            streams,
            journal,
            token=token,
            lighthouse_addr=self.lighthouse_addr,
            num_replicas=num_replicas,
            min_replicas=min_replicas,
            model_section=model_section,
        )
        # Its own log lines, one for every request, would bury ours.
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="coordinator", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)
        if not self._server.started:
            self.shutdown()
            raise OSError("the coordinator's HTTP service has not started: the log says why")

    @property
    def is_serving(self) -> bool:
        """Whether the service answers."""
        return self._thread.is_alive()

    def group_has_ended(self, replica_id: int | str) -> None:
        """A group's processes are gone: it may be started again without a wait."""
        self._registry.end(str(replica_id))

    def shutdown(self) -> None:
        """End the service and the lighthouse; all that was answered is on the disk."""
        self._server.should_exit = True
        self._thread.join(5.0)
        self._database.close()
        self._lighthouse.shutdown()


def _listen(bind: str) -> socket.socket:
    address, _, port = bind.rpartition(":")
    if not port.isdecimal() or not address:
        raise ValueError(f"--bind {bind!r}: write address:port, e.g. 0.0.0.0:29512 or [::]:0")
    host = address.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server(
            (host, int(port)), family=family, dualstack_ipv6=host == "::", reuse_port=False
        )
        # Accepted ones inherit it. asyncio does not set it on sockets that are not its own, and
        # without it the second packet of an answer waits 40 ms for the client to say it has one.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise OSError(f"cannot listen at --bind {bind}: {error}. Choose another port") from error


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
