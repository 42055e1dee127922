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
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from socketserver import StreamRequestHandler
from typing import Any

from composer_replication.replica.addresses import bracketed, listen
from composer_replication.replica.connections import BackgroundServer

log = logging.getLogger(__name__)


LARGEST_REQUEST = 64 << 10
MOST_CONNECTIONS = 64
MOST_NOTICES = 4096
REQUEST_WITHIN_S = 5.0
ASK_AGAIN_AFTER_S = 0.02


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
        timeout_s: How long a request is repeated that the board closes without an answer, in
            seconds, and the limit of each wait for the board.
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
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._ask_once(request, deadline - time.monotonic())
            except (ConnectionRefusedError, TimeoutError):
                raise  # nobody listens, so its process has ended; or it has had all of the time
            except ConnectionError:
                # A board that strangers keep full closes connections, those of members too.
                if time.monotonic() > deadline - ASK_AGAIN_AFTER_S:
                    raise
            time.sleep(ASK_AGAIN_AFTER_S)

    def _ask_once(self, request: Mapping[str, Any], limit_s: float) -> dict[str, str]:
        with socket.create_connection(self._address, limit_s) as connection:
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
        super().__init__(listener, _Handler, "notice_board", MOST_CONNECTIONS)
        self.tokens = tokens
        self.notices: OrderedDict[str, str] = OrderedDict()
        self.lock = threading.Lock()

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
