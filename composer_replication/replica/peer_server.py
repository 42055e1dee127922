"""The server of a rank: it sends the group's state to peers, and keeps their notices.

Strangers can reach it. So a connection that has not proven the run's token yet gets few resources:
there are at most ``MOST_UNPROVEN`` of them, each for ``PROOF_WITHIN_S``, with a small request.
Strangers can use up neither the file descriptors nor the memory of the training process, and they
cannot keep an honest peer out.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from composer_replication.replica.addresses import bracketed, listen
from composer_replication.replica.peer_client import is_proven, proof, receive, send
from composer_replication.util.connections import RateLimitedCount, Strangers

log = logging.getLogger(__name__)

Body = Sequence[memoryview]

MOST_UNPROVEN = 64
"""How many connections that have not proven the token may be open at a time."""

PROOF_WITHIN_S = 5.0
LARGEST_REQUEST = 64 << 10
MOST_NOTICES = 4096
ACCEPT_PAUSE_S = 0.5

SILENT_S = 60
"""How long a joiner may receive nothing before the server gives up on it, in seconds."""

PARTS_A_CALL = 1024
"""How many buffers the kernel takes in one call (``IOV_MAX``)."""


@dataclass(eq=False)
class Served:
    """An answer that is sent as bytes, and held until then.

    Attributes:
        body: The bytes, in parts.
    """

    body: Body


class PeerServer:
    """Answers peers that prove that they know one of the run's tokens, until ``close``.

    A peer that connects gets a challenge. It sends a request, a list of texts of which the first is
    the kind, with a proof for that challenge. A recorded request is worth nothing on another
    connection, and one that was made for another server's address is rejected, so that a stranger
    cannot pass it on. The answer is a value that JSON can hold, with a proof of its own. The bytes
    of a part of the state follow their number, and need no proof: the part's name is their hash.

    Each connection has a daemon thread, and so has the loop that accepts them.

    Args:
        hostname: How peers reach this machine. None: its host name. See ``listen``.
        tokens: The run's accepted tokens; the first one signs.

    Attributes:
        address: ``host:port`` under which peers reach it.
        answers: By kind of request, a function of its arguments that gives the answer. It raises a
            KeyError if there is nothing. After any other error the peer hears that it failed. It is
            called on the connections' threads.
        unproven: The connections that may be strangers'.
    """

    CLOSE_WITHIN_S = 5.0
    """How long ``close`` waits for the loop, which may be in its pause of ``ACCEPT_PAUSE_S``."""

    def __init__(self, hostname: str | None, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens) or ("",)
        self._listener = listen(hostname)
        self._listener.settimeout(0.1)  # so that the loop sees ``close`` soon
        port = self._listener.getsockname()[1]
        self.address = f"{bracketed(hostname or socket.gethostname())}:{port}"
        self.answers: dict[str, Callable[..., Any]] = {"post": self._post, "read": self._read}
        self.unproven = Strangers(MOST_UNPROVEN)
        self._rejections = RateLimitedCount()
        self._shortages = RateLimitedCount()
        self._notices: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()  # for the notices: each connection has a thread of its own
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept_all, name="peer_server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections. Open connections are answered to their end."""
        self._closing.set()
        # Daemon threads do not run any more while the interpreter is finalising: a join would wait
        # in vain.
        if not sys.is_finalizing():
            self._thread.join(self.CLOSE_WITHIN_S)

    # ---- notices -----------------------------------------------------------------------------

    def _post(self, key: str, notice: str) -> None:
        with self._lock:
            self._notices[key] = notice
            # The oldest ones belong to earlier connections.
            while len(self._notices) > MOST_NOTICES:
                self._notices.popitem(last=False)

    def _read(self, *keys: str) -> dict[str, str]:
        with self._lock:
            return {key: self._notices[key] for key in keys if key in self._notices}

    # ---- connections -------------------------------------------------------------------------

    def _accept_all(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    connection, (host, *_) = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:  # such as EMFILE
                    self._pause(error)
                    continue
                thread = threading.Thread(target=self._serve, args=(connection, host), daemon=True)
                try:
                    self.unproven.add(connection, host)
                    thread.start()
                except Exception as error:  # such as RuntimeError: the process has no thread left
                    connection.close()
                    self._pause(error)

    def _pause(self, error: Exception) -> None:
        # A connection stays in the kernel's queue. Without this pause the loop would spin and take
        # the interpreter lock from the training thread.
        if count := self._shortages.count():
            log.warning("Cannot accept a connection (%s), %d times", error, count)
        time.sleep(ACCEPT_PAUSE_S)

    def _serve(self, connection: socket.socket, host: str) -> None:
        with connection:
            try:
                self._answer(connection, host)
            except Exception:  # a stranger's odd request, or a broken line, which a peer logs
                log.debug("A request from %s failed", host, exc_info=True)
            finally:
                self.unproven.discard(connection)

    def _answer(self, connection: socket.socket, host: str) -> None:
        challenge = secrets.token_hex(16)
        deadline = time.monotonic() + PROOF_WITHIN_S
        send(connection, challenge, deadline)
        asked = receive(connection, LARGEST_REQUEST, deadline)
        request = asked["request"]
        name = asked["name"]
        question = (self.address, challenge, asked["nonce"], name, request)
        if not is_proven(self.tokens, asked["proof"], "question", *question):
            # A line for every request would let a stranger fill the disk.
            if count := self._rejections.count():
                log.warning(
                    "Rejected a request for the global state from %s, who says to be %r: no valid "
                    "token. Rejected since the last such line: %d",
                    host,
                    name[:64],
                    count,
                )
            send(connection, {"error": "rejected"}, deadline)
            return
        self.unproven.discard(connection)  # the token is proven: it is a peer's
        kind, *arguments = request
        try:
            answer = self.answers[kind](*arguments)
        except KeyError:
            send(connection, {"error": "nothing"}, time.monotonic() + SILENT_S)
            return
        except Exception as error:  # such as a MemoryError of the copy
            log.warning(
                "Could not answer %r of group %s at %s: %s: %s",
                kind,
                name,
                host,
                type(error).__name__,
                error,
            )
            send(connection, {"error": "failed"}, time.monotonic() + SILENT_S)
            return
        content = sum(map(len, answer.body)) if isinstance(answer, Served) else answer
        signed = proof(self.tokens[0], "answer", *question, content)
        send(connection, {"answer": content, "proof": signed}, time.monotonic() + SILENT_S)
        if isinstance(answer, Served):
            _send_body(connection, answer.body)
            log.info(
                "Gave a part of the state to group %s at %s: %d bytes, sha256 %s",
                name,
                host,
                content,
                request[-1],
            )


def _send_body(connection: socket.socket, body: Body) -> None:
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
