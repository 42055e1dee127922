"""Serving a group's state to its peers, from inside a training process that strangers can reach.

A connection that has not proven the token gets little: a few at a time, for seconds, with a small
request. So strangers can take neither the trainer's file descriptors and memory, nor the place of
an honest joiner.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from itertools import islice
from typing import Any

from composer_replication.replica import audit
from composer_replication.replica.background_server import BackgroundServer
from composer_replication.replica.heal.proof import ASKER, CHALLENGE, MAC, NONCE, Question

log = logging.getLogger(__name__)

Body = Sequence[memoryview]

MOST_UNPROVEN = 16
"""Connections that have not proven the token yet, at a time."""

PROOF_WITHIN_S = 5.0
LARGEST_HEAD = 8 << 10
SAY_EVERY_S = 60.0
ACCEPT_PAUSE_S = 0.5

SILENT_S = 60
"""How long a joiner may take nothing, in seconds."""

PARTS_A_CALL = 1024
"""What the kernel takes at a time (``IOV_MAX``)."""

TLS_CHUNK = 1 << 20
"""Bytes of an encrypted answer that a joiner has to take within ``SILENT_S``."""

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HealServer(BackgroundServer):
    """Answers those who prove that they know one of the run's tokens; each in a thread.

    Args:
        listener: A listening socket, which the server closes in the end.
        address: ``http://host:port`` under which peers reach it. A proof for another is refused.
        tokens: The run's accepted tokens; the first one signs.
        answer: What a path gets; a KeyError says that there is nothing.
        context: For TLS. None: no TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        tokens: Sequence[str],
        answer: Callable[[str], Body],
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._context = context
        self.address, self.tokens, self.answer = address, tokens, answer
        self.refusals = Seldom()
        self._shortages = Seldom()
        self._unproven: dict[socket.socket, str] = {}  # the oldest first, with their hosts
        self._changed = threading.Condition()
        super().__init__(listener, _Handler, "heal")

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            connection, place = super().get_request()
            if self._context is not None:
                # The first read of the connection's own thread shakes hands, within its deadline.
                connection = self._context.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
            return connection, place
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                # The connection stays in the queue: without a pause the loop would spin.
                if (count := self._shortages.count()) is not None:
                    log.warning("Cannot accept a connection (%s), %d times", error, count)
                time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection. Where there are too many without a proof, the oldest of
        the host that has most of them is closed for it."""
        with self._changed:
            if len(self._unproven) >= MOST_UNPROVEN:
                by_host = Counter(self._unproven.values())
                [(greediest, _)] = by_host.most_common(1)
                oldest = next(c for c, host in self._unproven.items() if host == greediest)
                with contextlib.suppress(OSError):  # it has just ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
            has_room = self._changed.wait_for(
                lambda: len(self._unproven) < MOST_UNPROVEN, PROOF_WITHIN_S
            )
            if has_room:
                self._unproven[request] = client_address[0]
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def has_proven(self, connection: socket.socket) -> None:
        """Count a connection as a peer's from now on."""
        with self._changed:
            self._unproven.pop(connection, None)
            self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.has_proven(request)  # or it never will: it is closed

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: that a joiner breaks off is the joiner's matter, and it says so."""


class Seldom:
    """Says when something that strangers can cause may be logged: once in ``SAY_EVERY_S``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._said = 0, -SAY_EVERY_S

    def count(self) -> int | None:
        """Count it; return how often it has happened since the last line, if one is due."""
        with self._lock:
            self._count += 1
            if time.monotonic() - self._said < SAY_EVERY_S:
                return None
            count, self._count, self._said = self._count, 0, time.monotonic()
            return count


class _Handler(BaseHTTPRequestHandler):
    server: HealServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"  # a question is two requests on one connection

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # heads are read by handle_one_request
        self._until = time.monotonic() + PROOF_WITHIN_S
        self._challenge = ""

    def handle_one_request(self) -> None:
        head = _read_head(self.connection, self._until)
        self.close_connection = True
        if head:
            self.rfile = io.BytesIO(head)
            super().handle_one_request()

    def do_GET(self) -> None:
        challenge, self._challenge = self._challenge, ""
        mac = self.headers.get(MAC)
        if mac is None:
            self._challenge = secrets.token_hex(16)
            self.send_response(401)
            self.send_header(CHALLENGE, self._challenge)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asker, nonce = self.headers.get(ASKER, ""), self.headers.get(NONCE, "")
        question = Question(self.server.address, self.path, asker, challenge, nonce)
        if not challenge or not question.is_proven(self.server.tokens, mac):
            self._refuse(asker)
            return
        self.server.has_proven(self.request)
        try:
            body = self.server.answer(self.path)
        except KeyError:
            self.send_error(404)
            return
        self._give(question, body)

    def _refuse(self, asker: str) -> None:
        if (count := self.server.refusals.count()) is not None:
            host = self.client_address[0]
            log.warning(
                "Refused the global state to %s: no valid token. Refusals since this was last "
                "said: %d",
                host,
                count,
            )
            audit.record("heal", asker[:64], host, outcome="refused", requests=count)
        self.send_error(403)

    def _give(self, question: Question, body: Body) -> None:
        size = sum(map(len, body))
        self.send_response(200)
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(size))
        is_part = self.path.startswith("/state/")
        if not is_part:  # those are named by their hash
            proof = question.proof_of_answer(self.server.tokens[0], b"".join(body))
            self.send_header(MAC, proof)
        self.end_headers()
        _send(self.connection, body)
        if is_part:
            name = self.path.rpartition("/")[2]
            audit.record(
                "heal",
                question.asker,
                self.client_address[0],
                outcome="given",
                sha256=name,
                num_bytes=size,
            )

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: http.server's is a line on stderr for every request."""


def _read_head(connection: socket.socket, until: float) -> bytes:
    """A request's head; nothing if it is too large, does not come in time, or has a body."""
    head = bytearray()
    while not head.endswith(b"\r\n\r\n"):
        left = until - time.monotonic()
        if left <= 0 or len(head) >= LARGEST_HEAD:
            return b""
        connection.settimeout(left)
        received = connection.recv(LARGEST_HEAD - len(head))
        if not received:
            return b""
        head += received
    return bytes(head)


def _send(connection: socket.socket, body: Body) -> None:
    """Send all parts in as few calls as can be.

    The limit is the kernel's: with Python's own every few MB are a call, after which this thread
    waits for the interpreter that the group trains with.
    """
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(SILENT_S)
        for part in body:
            for start in range(0, len(part), TLS_CHUNK):
                connection.sendall(part[start : start + TLS_CHUNK])
        return
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
