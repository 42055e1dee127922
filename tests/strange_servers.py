"""Servers that say whatever a test lets them say, in the place of a peer's."""

import contextlib
import socket
import threading


@contextlib.contextmanager
def strange_server(converse):
    """Serve on loopback: ``converse`` is called with each connection, on a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def handle(connection):
        with connection, contextlib.suppress(OSError):
            converse(connection)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        listener.close()
