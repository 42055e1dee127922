"""The donor's side of a heal: serves a group's state from inside a training process.

Strangers can reach this server. So a connection that has not proven the run's token yet gets few
resources: there are at most ``MOST_UNPROVEN`` of them, each for ``PROOF_WITHIN_S``, with a small
request. Strangers can use up neither the file descriptors nor the memory of the training process,
and they cannot keep an honest joiner out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import secrets
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from itertools import islice
from typing import Any

from composer_replication.replica.heal.protocol import CHALLENGE, CLIENT_NAME, MAC, NONCE, Question
from composer_replication.replica.notice_board import BackgroundServer

log = logging.getLogger(__name__)

Body = Sequence[memoryview]

MOST_UNPROVEN = 16
"""How many connections that have not proven the token may be open at a time."""

PROOF_WITHIN_S = 5.0
LARGEST_HEAD = 8 << 10
LOG_EVERY_S = 60.0
ACCEPT_PAUSE_S = 0.5

SILENT_S = 60
"""How long a joiner may receive nothing before the server gives up on it, in seconds."""

PARTS_A_CALL = 1024
"""How many buffers the kernel takes in one call (``IOV_MAX``)."""

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


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
        self._shortages = RateLimitedCount()
        self._unproven: dict[socket.socket, str] = {}  # with their hosts; the oldest comes first
        self._changed = threading.Condition()
        super().__init__(listener, _Handler, "heal")

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                # The connection stays in the kernel's queue. Without this pause the loop would spin
                # and take the interpreter lock from the training thread.
                if (count := self._shortages.count()) is not None:
                    log.warning("Cannot accept a connection (%s), %d times", error, count)
                time.sleep(ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection.

        If too many connections have no proof yet, the oldest one of the host with most of them is
        closed. Otherwise a stranger that keeps opening connections would keep joiners out.
        """
        with self._changed:
            if len(self._unproven) >= MOST_UNPROVEN:
                by_host = Counter(self._unproven.values())
                [(greediest, _)] = by_host.most_common(1)
                oldest = next(c for c, host in self._unproven.items() if host == greediest)
                with contextlib.suppress(OSError):  # it may just have ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # ends the read that its thread waits in
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
        """Count a connection as a peer's from now on; wakes the thread that waits for room."""
        with self._changed:
            self._unproven.pop(connection, None)
            self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.has_proven(request)  # it is closed, so it takes no room any more

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect: the joiner logs the reason itself."""


class RateLimitedCount:
    """Counts events that strangers can cause, and says when the count may be logged.

    A line for every event would let a stranger fill the disk with the log. So there is at most one
    line in ``LOG_EVERY_S``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # connections have threads of their own
        self._count, self._logged_at = 0, -LOG_EVERY_S

    def count(self) -> int | None:
        """Count one event.

        Returns:
            How many events there have been since the last line, if a new line is due; else None.
        """
        with self._lock:
            self._count += 1
            if time.monotonic() - self._logged_at < LOG_EVERY_S:
                return None
            count, self._count, self._logged_at = self._count, 0, time.monotonic()
            return count


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
        self.server.has_proven(self.request)
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
