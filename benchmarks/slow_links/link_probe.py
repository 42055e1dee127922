"""What a shaped link really gives: the rate and the round trip of a plain TCP connection."""

from __future__ import annotations

import socket
import statistics
import time

from .links import Endpoint

_PORT = 29400
_PINGS = 9
_TIMEOUT_S = 60.0


def receive_probe(end: Endpoint, num_bytes: int) -> float:
    """The far end of ``send_probe``; the rate of the second half, in bits of payload a second."""
    with socket.create_server((end.address, _PORT)) as server:
        server.settimeout(_TIMEOUT_S)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_PINGS):
            connection.sendall(connection.recv(1))
        received, buffer = 0, bytearray(2**20)
        half_at, half = 0.0, 0
        while received < num_bytes:
            received += connection.recv_into(buffer)
            if not half and received >= num_bytes // 2:
                half_at, half = time.perf_counter(), received
        return 8 * (received - half) / (time.perf_counter() - half_at)


def send_probe(end: Endpoint, num_bytes: int) -> float:
    """Send bytes to the other end of a link; before that, the median round trip in seconds."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((end.peer_address, _PORT), timeout=_TIMEOUT_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - began)
        connection.sendall(bytes(num_bytes))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the other end has it all
    return statistics.median(trips)
