"""Short notices that the members of a quorum post for each other, and the server under them.

torch's TCPStore could hold them. But its client looks up the host name of every address that it
connects to, which takes seconds where no name server answers. Its calls have no time limit, so a
stopped member would stop every member that asks it. And it writes stack traces to stderr when a
peer has gone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import socket
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from socketserver import StreamRequestHandler, TCPServer, ThreadingMixIn
from typing import Any

from composer_replication.replica.addresses import bracketed, listen

log = logging.getLogger(__name__)


class BackgroundServer(ThreadingMixIn, TCPServer):
    """Serves from a daemon thread until ``stop``; each connection has a daemon thread too.

    socketserver's ``serve_forever`` is not used. Its ``shutdown`` waits for the serving thread
    without a limit. Once the interpreter is finalising, daemon threads never run again, so a
    training process that is about to end would hang there.

    Args:
        listener: A listening socket, which the server closes in the end.
        handler: The class that handles a connection (``socketserver.BaseRequestHandler``).
        name: The name of the serving thread.
    """

    daemon_threads = True
    block_on_close = False
    timeout = 0.1
    """How long the loop waits for a connection before it checks whether to stop, in seconds."""

    STOP_WITHIN_S = 5.0
    """How long ``stop`` waits for the loop, which may be waiting for room for a connection."""

    def __init__(self, listener: socket.socket, handler: Any, name: str) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()  # the one that socketserver has made, which is not bound
        self.socket = listener
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop accepting connections. Open connections are answered to their end."""
        self._stopping.set()
        # Threads do not run any more while the interpreter is finalising: a join would only wait.
        if not sys.is_finalizing():
            self._thread.join(self.STOP_WITHIN_S)

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self.handle_request()
        finally:
            self.server_close()


LARGEST_REQUEST = 64 << 10
MOST_CONNECTIONS = 64
MOST_NOTICES = 4096
REQUEST_WITHIN_S = 5.0


class NoticeBoard:
    """The notices of one process. Anybody may read them; members of the run may post.

    Each connection is for one request, a line of JSON: ``{"read": keys}``, or ``{"post": key,
    "value": value, "proof": proof}`` with an HMAC of the run's token. The answer is a line of JSON.

    Args:
        hostname: How peers reach this machine. None: its host name. See ``listen``.
        tokens: The run's accepted secrets.

    Attributes:
        address: ``host:port`` of the board, as peers reach it.
    """

    def __init__(self, hostname: str | None, tokens: Sequence[str]) -> None:
        self._server = _Server(listen(hostname), tuple(tokens) or ("",))
        port = self._server.socket.getsockname()[1]
        self.address = f"{bracketed(hostname or socket.gethostname())}:{port}"
        self._server.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.stop()


class Notices:
    """A client of one member's board.

    Args:
        address: ``host:port`` of the board.
        tokens: The run's secrets; the first one signs.
        timeout_s: Limit of each wait for the board, in seconds.
    """

    def __init__(self, address: str, tokens: Sequence[str], timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._address: Any = (host.strip("[]"), int(port))
        self._token = (*tokens, "")[0]
        self._timeout_s = timeout_s

    def post(self, key: str, value: str) -> None:
        """Post a notice; it replaces an earlier one with the same key.

        Raises:
            OSError: The board cannot be reached.
        """
        self._ask({"post": key, "value": value, "proof": _proof(key, value, self._token)})

    def read(self, keys: Iterable[str]) -> dict[str, str]:
        """Read the notices with these keys; a key without a notice is left out.

        Raises:
            OSError: The board cannot be reached.
        """
        return self._ask({"read": list(keys)})

    def _ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        with socket.create_connection(self._address, self._timeout_s) as connection:
            self._address = connection.getpeername()[:2]  # so that the name is looked up once only
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answer:
                line = answer.readline(LARGEST_REQUEST)
        try:
            notices = json.loads(line)
            return {str(key): str(value) for key, value in notices.items()}
        except (ValueError, AttributeError) as error:
            raise ConnectionError(
                f"no notice board answers at {self._address}: rank 0 of the first replica group "
                "has ended, or its ports are closed to this machine"
            ) from error


def _proof(key: str, value: str, token: str) -> str:
    text = json.dumps([key, value]).encode()
    return hmac.new(token.encode(), b"notice\0" + text, hashlib.sha256).hexdigest()


class _Server(BackgroundServer):
    """Holds the notices. ``lock`` guards them: each connection has a thread."""

    def __init__(self, listener: socket.socket, tokens: Sequence[str]) -> None:
        super().__init__(listener, _Handler, "notice_board")
        self.tokens = tokens
        self.notices: OrderedDict[str, str] = OrderedDict()
        self.lock = threading.Lock()
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            # The open connections are of strangers: members ask for milliseconds. Waiting for room
            # here would keep the loop from accepting the next member.
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("A request to the notice board failed", exc_info=True)


class _Handler(StreamRequestHandler):
    timeout = REQUEST_WITHIN_S
    server: _Server

    def handle(self) -> None:
        request = json.loads(self.rfile.readline(LARGEST_REQUEST))
        notices = self.server.notices
        with self.server.lock:
            answer = {key: notices[key] for key in request.get("read", ()) if key in notices}
            if "post" in request and self._is_proven(request):
                notices[request["post"]] = request["value"]
                while len(notices) > MOST_NOTICES:  # of earlier connections
                    notices.popitem(last=False)
        self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _is_proven(self, request: Mapping[str, Any]) -> bool:
        key, value, proof = request["post"], request["value"], request["proof"]
        return all(isinstance(each, str) for each in (key, value, proof)) and any(
            hmac.compare_digest(proof.encode(), _proof(key, value, token).encode())
            for token in self.server.tokens
        )
