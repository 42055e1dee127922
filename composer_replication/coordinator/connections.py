"""Limits the connections to the coordinator: their number, and how long a silent one is kept."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 500
RECEIVE_TIMEOUT_S = 10.0
"""Seconds from a request's first byte, or from the start of the connection, to its last byte."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds from there until the client has read the answer and started the next request."""
FILES = 4096
"""File descriptors that this process asks for. The usual soft limit is 1,024."""
BACKLOG = 128
"""Connections that may wait to be accepted."""


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits on time and on the number of connections.

    uvicorn itself waits for ever for a request that does not come, and for a client that does not
    read its answer. Here a connection is closed after a timeout. There are at most
    ``MAX_CONNECTIONS``: a new connection replaces the one that has been silent for longest, so that
    idle connections never keep a replica group out.
    """

    _timer: asyncio.TimerHandle | None = None
    _is_receiving = True
    _last_active = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._last_active = self.loop.time()
        self._limit(RECEIVE_TIMEOUT_S)
        if len(self.connections) > _max_connections():
            others: Any = self.connections - {self}
            silent = min(others, key=lambda other: other._last_active)
            # At once: else the next connection could select the same one before it has closed.
            self.connections.discard(silent)
            silent.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._last_active = self.loop.time()
        super().data_received(data)
        is_receiving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        # Further bytes of the same request do not extend its time: a client that sends one byte a
        # second would otherwise hold its connection for ever.
        if not (is_receiving and self._is_receiving):
            self._limit(RECEIVE_TIMEOUT_S if is_receiving else ANSWER_TIMEOUT_S)
        self._is_receiving = is_receiving

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _limit(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # abort, not close, which would wait until the client has read what was written.
        self._timer = self.loop.call_later(seconds, self.transport.abort)


class _OncePerMinute(logging.Filter):
    """Lets asyncio log once a minute that no file descriptors are left.

    asyncio logs it for every connection in the backlog, with a traceback, every second.
    """

    _next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if "socket.accept() out of system resource" not in record.getMessage():
            return True
        is_due = time.monotonic() >= self._next
        if is_due:
            self._next = time.monotonic() + 60.0
        return is_due


FILES_RUN_OUT = _OncePerMinute()
"""A filter for asyncio's logger."""


def _max_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The other half is for the lighthouse, which runs in this process, and for the database.
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def raise_file_limit() -> None:
    """Ask for ``FILES`` file descriptors, or for as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
