"""How a joiner gets the global state from a peer: authenticated, checked, and without pickles.

torchft's own transport unpickles whatever the peer sends, tells the machine's host name whatever it
is told, and serves only while the donor waits in a quorum, so that a slow download stalls everyone.
Here the state is named by its SHA-256. A joiner may fetch it before it asks for a quorum, and then
needs nothing but that name when the quorum has formed.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torchft.checkpointing.transport import CheckpointTransport

from composer_replication import heal_format
from composer_replication.heal_client import (
    MAC,
    NONCE,
    fetch,
    fetch_state,
    load,
    sign,
)

log = logging.getLogger(__name__)

STATE = "diloco"
"""Key of the part of the heal state that is large, and that a joiner can fetch ahead."""

Body = Sequence[memoryview]

SILENT_S = 60
"""How long a joiner may take nothing, in seconds."""

PARTS_A_CALL = 1024
"""What the kernel takes at a time (``IOV_MAX``)."""

KEPT_S = 60.0
"""How long a copy of the state is kept for the joiner who has asked for its name."""


class HealTransport(CheckpointTransport[dict[str, Any]]):
    """Serves this group's state to joiners, and fetches a donor's; one in each rank.

    Args:
        token: Shared by the groups of a run. Both sides of a heal prove that they know it.
        hostname: How peers reach this machine. None: its host name.
        timeout: How long a peer may be silent, in seconds.
    """

    def __init__(self, token: str, hostname: str | None, timeout: float) -> None:
        self._token = token
        self._timeout = timeout
        self._lock = threading.Condition()
        self._bodies: dict[str, tuple[float, Body]] = {}
        self._current: Body | None = None  # while the donor waits in a quorum
        self._current_step = -1
        self.source: tuple[Callable[[], int], Callable[[], Mapping[str, Any]]] | None = None
        """Gives the manager's step and the global state, at any time and from any thread."""
        self.fetched: dict[str, memoryview] = {}
        self._server = _Server(self)
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="heal", daemon=True
        ).start()
        host = hostname or socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        self.port = self._server.server_address[1]
        self._address = f"http://{host}:{self.port}"

    # ---- the donor ---------------------------------------------------------------------------

    def metadata(self) -> str:
        return self._address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        """Offer the state of a manager step until ``disallow_checkpoint``."""
        del dst_ranks, timeout
        user = dict(state_dict["user"])
        state = user.pop(STATE)
        name, _ = self._keep(state)
        # As bytes, now: with a delay the group trains on while a joiner is still to ask for it.
        rest = heal_format.dump({"user": user, "torchft": state_dict["torchft"], "state": name})
        rest = [memoryview(b"".join(rest))]
        with self._lock:
            self._current, self._current_step = rest, step
            self._lock.notify_all()

    def disallow_checkpoint(self) -> None:
        """End the offer; torchft calls it at every vote. Copies that nobody fetched in time go."""
        with self._lock:
            self._current = None
            oldest = time.monotonic() - KEPT_S
            self._bodies = {n: kept for n, kept in self._bodies.items() if kept[0] > oldest}

    def _keep(self, state: Mapping[str, Any]) -> tuple[str, int]:
        """Offer a state, of copies already, under the name that is returned with its bytes."""
        body = heal_format.dump(state)
        name = heal_format.digest(body)
        with self._lock:
            # A joiner may be about to fetch the one before; what is being sent stays alive anyway.
            while len(self._bodies) > 1:
                del self._bodies[next(iter(self._bodies))]
            self._bodies[name] = time.monotonic(), body
        return name, sum(map(len, body))

    def answer(self, path: str) -> Body:
        """What a request gets.

        Raises:
            KeyError: There is nothing at this path, now.
        """
        kind, _, which = path.strip("/").partition("/")
        if kind == "state":
            with self._lock:
                return self._bodies[which][1]
        if kind == "latest" and self.source is not None:
            step, snapshot = self.source
            latest: dict[str, Any] = {"step": step()}
            if which == "offer":
                latest["state"], latest["num_bytes"] = self._keep(snapshot())
            return [memoryview(json.dumps(latest).encode())]
        if kind == "rest":
            with self._lock:  # a joiner may be quicker to ask than this group is to offer
                self._lock.wait_for(lambda: self._offers(which), self._timeout)
                if self._current is not None and self._offers(which):
                    return self._current
        raise KeyError(path)

    def _offers(self, step: str) -> bool:
        return self._current is not None and str(self._current_step) == step

    def sign(self, nonce: str, content: bytes) -> str:
        """What proves the knowledge of the token, for this nonce and content."""
        return sign(self._token, nonce, content)

    # ---- the joiner --------------------------------------------------------------------------

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Fetch the donor's state of a manager step, or only its name if it is here already."""
        del src_rank
        deadline = time.monotonic() + timeout.total_seconds()
        rest = load(fetch(metadata, f"/rest/{step}", self._token, self._timeout, deadline))
        # Whoever pickles a part of the memory for its ranks would pickle all of it.
        rest = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, rest)
        name = rest.pop("state")
        body = self.fetched.pop(name, None)
        if body is None:
            into = next(iter(self.fetched.values()), None)  # it has been overtaken
            body = fetch_state(metadata, name, self._token, self._timeout, deadline, into)
        self.fetched.clear()
        rest["user"][STATE] = load(body)
        return rest

    def shutdown(self, wait: bool = True) -> None:
        del wait
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_INET6
    request_queue_size = 1024

    def __init__(self, transport: HealTransport) -> None:
        self.transport = transport
        super().__init__(("", 0), _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A joiner that breaks off is the joiner's matter."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = SILENT_S

    def do_GET(self) -> None:
        transport, nonce = self.server.transport, self.headers.get(NONCE, "")
        proof = transport.sign(nonce, self.path.encode())
        if not hmac.compare_digest(proof, self.headers.get(MAC, "")):
            log.warning("Refused the global state to %s: no valid token", self.client_address[0])
            self.send_error(403)
            return
        try:
            body = transport.answer(self.path)
        except KeyError:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(sum(map(len, body))))
        is_small = not self.path.startswith("/state/")  # those are named by their hash
        self.send_header(MAC, transport.sign(nonce, b"".join(body)) if is_small else "")
        self.end_headers()
        _send(self.connection, body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line on stderr for every request."""


def _send(connection: socket.socket, body: Body) -> None:
    """Send all parts in as few calls as can be.

    The limit is the kernel's: with Python's own every few MB are a call, after which this thread
    waits for the interpreter that the group trains with.
    """
    connection.settimeout(None)
    limit = struct.pack("ll", SILENT_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    waiting = deque(filter(len, body))
    while waiting:
        sent = connection.sendmsg(islice(waiting, PARTS_A_CALL))
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.popleft())
        if sent:
            waiting[0] = waiting[0][sent:]
