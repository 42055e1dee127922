"""The donor's side of a heal: serves a group's state from inside a training process.

Strangers can reach this server. So a connection that has not proven the run's token yet gets few
resources: there are at most ``MOST_UNPROVEN`` of them, each for ``PROOF_WITHIN_S``, with a small
request. Strangers can use up neither the file descriptors nor the memory of the training process,
and they cannot keep an honest joiner out.
"""

from __future__ import annotations

import contextlib
import io
import logging
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from itertools import islice
from typing import Any

from composer_replication.replica.connections import BackgroundServer, RateLimitedCount
from composer_replication.replica.heal.protocol import CHALLENGE, CLIENT_NAME, MAC, NONCE, Question

log = logging.getLogger(__name__)

Body = Sequence[memoryview]

MOST_UNPROVEN = 16
"""How many connections that have not proven the token may be open at a time."""

PROOF_WITHIN_S = 5.0
LARGEST_HEAD = 8 << 10

SILENT_S = 60
"""How long a joiner may receive nothing before the server gives up on it, in seconds."""

PARTS_A_CALL = 1024
"""How many buffers the kernel takes in one call (``IOV_MAX``)."""


class HealServer(BackgroundServer):
    """Answers clients that prove that they know one of the run's tokens.

    Each connection has a thread. A request takes two rounds: the first is answered with a
    challenge, and the second, with a proof for that challenge, with what is asked for.

    Args:
        listener: A listening socket, which the server closes in the end.
        address: ``http://host:port`` under which peers reach it. A proof that was made for another
            address is rejected.
        tokens: The run's accepted tokens; the first one signs.
        answer: Gives a context with the answer to a path, which ends when the answer has been
            sent, or raises a KeyError on entering if there is nothing. It is called on the
            connections' threads.

    Attributes:
        rejections: Requests without a valid proof, for the log.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        tokens: Sequence[str],
        answer: Callable[[str], AbstractContextManager[Body]],
    ) -> None:
        self.address, self.tokens, self.answer = address, tokens, answer
        self.rejections = RateLimitedCount()
        super().__init__(listener, _Handler, "heal", MOST_UNPROVEN)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect: the joiner logs the reason itself."""


class _Handler(BaseHTTPRequestHandler):
    """Handles one connection: a challenge, then a proof and the answer to it."""

    server: HealServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"  # both rounds of a request are on one connection

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # ``handle_one_request`` reads heads itself, within a deadline
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
        client_name, nonce = self.headers.get(CLIENT_NAME, ""), self.headers.get(NONCE, "")
        question = Question(self.server.address, self.path, client_name, challenge, nonce)
        if not challenge or not question.is_proven(self.server.tokens, mac):
            self._reject(client_name)
            return
        self.server.unproven.discard(self.request)  # it is a peer's
        with contextlib.ExitStack() as stack:
            try:
                body = stack.enter_context(self.server.answer(self.path))
            except KeyError:
                self.send_error(404)
                return
            self._send_answer(question, body)

    def _reject(self, client_name: str) -> None:
        if (count := self.server.rejections.count()) is not None:
            host = self.client_address[0]
            log.warning(
                "Rejected a request for the global state from %s, who says to be %r: no valid "
                "token. Rejected since the last such line: %d",
                host,
                client_name[:64],
                count,
            )
        self.send_error(403)

    def _send_answer(self, question: Question, body: Body) -> None:
        size = sum(map(len, body))
        self.send_response(200)
        self.send_header("Connection", "close")
        self.send_header("Content-Length", str(size))
        is_part = self.path.startswith("/state/")
        if not is_part:  # a part needs no proof: its name is its hash
            proof = question.proof_of_answer(self.server.tokens[0], b"".join(body))
            self.send_header(MAC, proof)
        self.end_headers()
        _send(self.connection, body)
        if is_part:
            log.info(
                "Gave a part of the state to group %s at %s: %d bytes, sha256 %s",
                question.client_name,
                self.client_address[0],
                size,
                self.path.rpartition("/")[2],
            )

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: http.server writes a line to stderr for every request."""


def _read_head(connection: socket.socket, until: float) -> bytes:
    """Read the head of a request; empty if it is too large, comes too late, or has a body."""
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
    """Send all parts, in as few calls as possible.

    The time limit is the kernel's (``SO_SNDTIMEO``). With a timeout of Python's own, a call would
    send a few MB at most, and after each call this thread would wait for the interpreter lock of
    the training thread.
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
