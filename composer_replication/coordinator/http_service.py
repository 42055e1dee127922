"""The coordinator's HTTP server: its socket, its thread and its certificate."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from composer_replication import __version__
from composer_replication.coordinator.wire_types import SIGN
from composer_replication.util.connections import Strangers

BACKLOG = 4096
"""Connections that may wait to be accepted."""

ACCEPTED_AT_ONCE = 16
"""How many asyncio accepts before it serves those that it has. It is far below
``MOST_CONNECTIONS``: a connection is to be served before so many newer ones have come."""

MOST_CONNECTIONS = 400
"""How many may be open. It is above what the groups have; they connect again after a close."""

KEEP_UP_EVERY_S = 2
"""How often what is beside the service is looked after, in seconds."""


class Listener(socket.socket):
    """A listening socket that keeps at most ``MOST_CONNECTIONS`` of those it has accepted.

    It counts them before their TLS handshake, of which uvicorn would know nothing.

    Args:
        bind: Address to listen at, ``address:port``. Port 0 is a free one.

    Attributes:
        host: The address, without brackets.
        port: The port.

    Raises:
        ValueError: ``bind`` is not an address.
        OSError: The address cannot be listened at.
    """

    def __init__(self, bind: str) -> None:
        address, _, port = bind.rpartition(":")
        if not port.isdecimal() or not address:
            raise ValueError(f"--bind {bind!r}: use address:port, such as 0.0.0.0:29512 or [::]:0")
        self.host = address.strip("[]")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listening = socket.create_server(
                (self.host, int(port)), family=family, dualstack_ipv6=self.host == "::"
            )
        except OSError as error:
            raise OSError(
                f"cannot listen at --bind {bind}: {error}. Choose another port"
            ) from error
        super().__init__(fileno=listening.detach())
        self.port: int = self.getsockname()[1]
        # Accepted sockets inherit it. asyncio does not set it on sockets that it did not create,
        # and without it the second packet of an answer waits 40 ms for the client's ACK.
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._accepted = Strangers(MOST_CONNECTIONS)

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """Listen with our own backlog: asyncio's is ``ACCEPTED_AT_ONCE``."""
        super().listen(BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._accepted.add(connection, address[0])
        return connection, address


class _Protocol(H11Protocol):
    """uvicorn's HTTP protocol, which also closes a connection on which no request comes at all.

    uvicorn itself waits for the next request ``timeout_keep_alive``, and for the first one for
    ever.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )


class HttpService:
    """Serves an application from a thread of its own. It answers when it has been made.

    Args:
        app: An ASGI application.
        listening: Where to listen.
        keep_up: Is called every ``KEEP_UP_EVERY_S``, on the thread of the service.
        ssl_certfile: The certificate for HTTPS (PEM), with the intermediate ones. None: plain HTTP.
        ssl_keyfile: Its private key.

    Raises:
        ValueError: The certificate or its key is missing, or they cannot be used.
        OSError: The server has not started.
    """

    def __init__(
        self,
        app: Any,
        listening: Listener,
        keep_up: Callable[[], Awaitable[None]] | None = None,
        ssl_certfile: Path | None = None,
        ssl_keyfile: Path | None = None,
    ) -> None:
        if (ssl_certfile is None) != (ssl_keyfile is None):
            missing = "--ssl-certfile" if ssl_certfile is None else "--ssl-keyfile"
            raise ValueError(f"{missing} is missing: HTTPS needs a certificate and its key")
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            backlog=ACCEPTED_AT_ONCE,
            loop="asyncio",  # others do not accept through ``Listener``
            timeout_keep_alive=10,
            # A line for every request, or for every malformed one, would hide our own log lines.
            log_level="error",
            callback_notify=keep_up,
            timeout_notify=KEEP_UP_EVERY_S,
            headers=[(SIGN, __version__)],
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is an OSError
            raise ValueError(
                f"the certificate cannot be used ({error}): {ssl_certfile}, {ssl_keyfile}"
            ) from error
        self._socket = listening
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="coordinator", daemon=True
        )
        self._thread.start()
        while not self._server.started and self.is_serving:
            time.sleep(0.01)
        if not self._server.started:
            raise OSError("the coordinator's HTTP service has not started: see the log")

    @property
    def is_serving(self) -> bool:
        """Whether the server is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the server and close its socket."""
        self._server.should_exit = True
        self._thread.join(5.0)
        self._socket.close()
