"""A TCP server inside a training process, which never waits for its threads without a limit."""

from __future__ import annotations

import socket
import sys
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import Any


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
