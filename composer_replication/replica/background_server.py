"""A TCP server inside a training process, which never waits for its threads without a limit."""

from __future__ import annotations

import socket
import sys
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Any


class BackgroundServer(ThreadingMixIn, TCPServer):
    """Serves from a daemon thread, each connection in one of its own, until ``stop``.

    socketserver's own loop is not used: its ``shutdown`` waits without a limit for that thread,
    which never runs again once the interpreter is finalising.

    Args:
        listener: A listening socket, which the server closes in the end.
        handler: Makes the answer to a connection.
        name: Of the thread.
    """

    daemon_threads = True
    block_on_close = False
    timeout = 0.1
    """How soon the loop sees that it is to stop, in seconds."""

    STOP_WITHIN_S = 5.0
    """How long ``stop`` waits. The loop may just then be waiting for room for a connection."""

    def __init__(self, listener: socket.socket, handler: Any, name: str) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()  # socketserver's own, which is not bound
        self.socket = listener
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Serve no more; connections that are being answered go on."""
        self._stopping.set()
        if not sys.is_finalizing():
            self._thread.join(self.STOP_WITHIN_S)

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self.handle_request()
        finally:
            self.server_close()
