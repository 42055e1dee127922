"""Connections of strangers: how many a server keeps, and which of them it closes first.

Everybody who reaches a port of a training process or of the coordinator can open connections there
and send nothing. They must use up neither the file descriptors of the process nor the places of the
peers. Imports neither torch nor torchft.
"""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

LOG_EVERY_S = 60.0

MOST_FILES = 1 << 16
"""Most file descriptors for which a process asks. Some programs, which a training may start, close
every number up to the limit before they begin."""


def raise_file_limit() -> None:
    """Allow this process as many file descriptors as the system lets it have.

    The usual soft limit of 1,024 is soon reached by strangers' connections to ports that have no
    limit of their own, such as those of torch's TCPStore, and torch then ends the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # some systems have a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Strangers:
    """The open connections of a server that may be strangers', at most ``most`` of them.

    When there is no room for a new one, the oldest connection of the host with most of them is
    shut down. So a host that keeps opening connections closes its own, and keeps no other out.

    Args:
        most: How many connections are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._hosts: dict[socket.socket, str] = {}  # the oldest comes first

    def add(self, connection: socket.socket, host: str) -> None:
        """Add a connection from a host; make room for it."""
        with self._lock:
            self._hosts = {c: h for c, h in self._hosts.items() if c.fileno() >= 0}  # open ones
            if len(self._hosts) >= self._most:
                [(greediest, _)] = Counter(self._hosts.values()).most_common(1)
                oldest = next(c for c, h in self._hosts.items() if h == greediest)
                del self._hosts[oldest]
                with suppress(OSError):  # it may just have ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)  # ends the read that waits for its request
            self._hosts[connection] = host

    def discard(self, connection: socket.socket) -> None:
        """Forget a connection that is closed, or whose other end has proved to be a member."""
        with self._lock:
            self._hosts.pop(connection, None)


class RateLimitedCount:
    """Counts events that strangers can cause, and says when the count may be logged.

    A line for every event would let a stranger fill the disk with the log. So there is at most one
    line in ``LOG_EVERY_S``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # connections have threads of their own
        self._count = 0
        self._logged_at = -LOG_EVERY_S

    def count(self) -> int:
        """Count one event.

        Returns:
            How many events there have been since the last line, if a new line is due; else 0.
        """
        with self._lock:
            self._count += 1
            if time.monotonic() - self._logged_at < LOG_EVERY_S:
                return 0
            count = self._count
            self._count = 0
            self._logged_at = time.monotonic()
            return count
