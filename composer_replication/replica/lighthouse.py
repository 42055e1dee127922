"""The torchft lighthouse: check an address, read the status page, start one in this process."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

if TYPE_CHECKING:
    from torchft.coordination import LighthouseServer

log = logging.getLogger(__name__)

# torchft's servers run on threads of Rust, which a forked process lacks, such as a DataLoader's
# worker. If it collected one as garbage, it would wait for these threads for ever.
os.register_at_fork(after_in_child=gc.freeze)

STRAGGLER_TIMEOUT_S = 60.0
"""How long a quorum waits for a group that is alive and has not asked for one, in seconds."""


CONNECT_TIMEOUT_S = 5.0
"""Limit of connecting to a lighthouse, a coordinator's or a group's address, in seconds."""


def check_lighthouse(lighthouse_addr: str, limit_s: float = CONNECT_TIMEOUT_S) -> None:
    """Check that something listens at a lighthouse's address. Imports neither torch nor torchft.

    Args:
        lighthouse_addr: ``http://host:port``.
        limit_s: How long to try, in seconds. The lighthouse may just be starting.

    Raises:
        ValueError: The address has another form.
        ConnectionError: Nothing answers at the address.
    """
    parts = urlsplit(lighthouse_addr)
    host = parts.hostname
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("http", "https") or not host or not port:
        raise ValueError(
            f"lighthouse_addr={lighthouse_addr!r}: use http://host:port, as the lighthouse says"
        )
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.5, limit_s)).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no lighthouse answers at {lighthouse_addr} ({error}). Start one with "
                    "`torchft_lighthouse --min_replicas 1`, correct TORCHFT_LIGHTHOUSE "
                    "(lighthouse_addr=...), or use `composer-replication launch --replicas 2 -- "
                    "python train.py`"
                ) from None
            time.sleep(0.2)


def can_connect(host: str, port: int, limit_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether something accepts a TCP connection at this address within ``limit_s`` seconds."""
    try:
        socket.create_connection((host, port), timeout=limit_s).close()
    except OSError:
        return False
    return True


class LastingServer:
    """A server of torchft's that is started again at its port when it has stopped accepting.

    It stops for good when its process has no file descriptor left for a moment. Connections that
    are open then go on, so that only a new one shows it.

    Args:
        start: Starts the server at ``host:port``.
        bind: Where it listens; port 0 is a free one.

    Raises:
        OSError | RuntimeError: ``start`` has failed.
    """

    def __init__(self, start: Callable[[str], Any], bind: str) -> None:
        self._start = start
        self._server = start(bind)
        self._host = bind.rpartition(":")[0]
        self._address: str = self._server.address()

    def address(self) -> str:
        """The address of the server, ``http://host:port``."""
        return self._address

    def shutdown(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.shutdown()

    def restart_if_it_refuses(self, what: str) -> None:
        """Start the server again if connections to it are refused.

        Args:
            what: What it is, for a warning.

        Raises:
            OSError | RuntimeError: It cannot be started now.
        """
        port = int(self._address.rpartition(":")[2])
        try:
            socket.create_connection((self._host.strip("[]"), port), CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            log.warning("%s accepts no connections any more, and is started again", what)
            self.shutdown()
            self._server = None  # with its last reference the old one closes its connections
            self._server = self._start(f"{self._host}:{port}")
        except OSError:
            pass  # it is busy, or this process has no file descriptor left for a moment


@dataclass(frozen=True)
class Member:
    """A replica group in a lighthouse's last quorum.

    Attributes:
        replica_id: The lighthouse's name of it: the replica id, a colon and a uuid.
        step: The manager's step when it asked for the quorum.
        manager_addr: The address of its manager server.
        world_size: How many ranks it has.
    """

    replica_id: str
    step: int
    manager_addr: str
    world_size: int = 1


@dataclass(frozen=True)
class LighthouseStatus:
    """What a lighthouse's status page says.

    Attributes:
        members: The members of the last quorum.
        situation: What the next quorum waits for.
        alive: The lighthouse's names of all members that have sent it a heartbeat within the
            heartbeat timeout.
    """

    members: tuple[Member, ...] = ()
    situation: str = "no reason given"
    alive: frozenset[str] = frozenset()


_DIRECTLY = build_opener(ProxyHandler({}))
"""An opener without the proxies of the environment; torchft's clients do not use them either."""

_MEMBER = re.compile(
    r"<b>([^<]+)</b>.*?Step: (\d+).*?Manager: (\S+).*?World size: (\d+)", re.DOTALL
)
_HEARTBEAT = re.compile(r'class="heartbeat([^"]*)">\s*(\S+): seen')
_SITUATION = re.compile(r"Next quorum status: ([^\n<]*)")


def read_status(lighthouse_addr: str) -> LighthouseStatus:
    """Read the lighthouse's status page, the only place where torchft lists the members.

    No group waits for one that reads the page, while one that asks for a quorum becomes a member.

    Args:
        lighthouse_addr: ``http://host:port``.

    Returns:
        The status. If the lighthouse does not answer it has no members, and ``situation`` says why.
    """
    try:
        with _DIRECTLY.open(f"{lighthouse_addr}/status", timeout=CONNECT_TIMEOUT_S) as answer:
            page = answer.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        return LighthouseStatus(
            situation=f"the lighthouse at {lighthouse_addr} is away ({error!r})"
        )
    members = tuple(
        Member(name, int(step), addr, int(ranks))
        for name, step, addr, ranks in _MEMBER.findall(page)
    )
    found = _SITUATION.search(page)
    situation = LighthouseStatus.situation if found is None else found[1].strip()
    alive = frozenset(name for age, name in _HEARTBEAT.findall(page) if "old" not in age)
    return LighthouseStatus(members, situation, alive)


def start_lighthouse(
    *,
    bind: str = "[::]:0",
    min_replicas: int = 1,
    join_timeout_ms: int = round(1000 * STRAGGLER_TIMEOUT_S),
    heartbeat_timeout_ms: int = 5_000,
) -> LighthouseServer:
    """Start a lighthouse in this process.

    Args:
        bind: Where it listens, ``address:port``. By default this is a free port of every interface.
        min_replicas: Fewest groups in a quorum. A cold start waits for the groups' own
            ``num_replicas`` instead, so that the survivors of a death can go on with fewer.
        join_timeout_ms: How long a quorum waits for a living group that has not asked for one yet,
            in milliseconds.
        heartbeat_timeout_ms: How long a group without a heartbeat counts as alive, in milliseconds.

    Returns:
        The server. ``address()`` is the ``lighthouse_addr`` of groups, ``shutdown()`` ends it.

    Raises:
        OSError: It cannot listen there.
    """
    try:
        return _compiled_torchft().LighthouseServer(
            bind=bind,
            min_replicas=min_replicas,
            join_timeout_ms=join_timeout_ms,
            quorum_tick_ms=50,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
    except RuntimeError as error:  # torchft's Rust code raises it
        raise OSError(
            f"a lighthouse cannot listen at {bind}: {error}. Use an address of this machine, and a "
            "port that no other process has"
        ) from error


def _compiled_torchft() -> Any:
    """Import torchft's compiled module, which has the lighthouse, without the rest of torchft.

    Importing torchft imports torch, which takes 1.5 s and 450 MB, and a coordinator does not need
    it. A later ``import torchft`` gets this same module.
    """
    name = "torchft._torchft"
    if name not in sys.modules:
        package = find_spec("torchft")
        spec = package and PathFinder.find_spec(name, package.submodule_search_locations)
        if spec is None or spec.loader is None:
            raise ImportError("torchft is missing: run pip install . in a clone of this package")
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
