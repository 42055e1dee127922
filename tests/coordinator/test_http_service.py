"""The coordinator's HTTP server against silent clients.

Run: pytest tests/coordinator/test_http_service.py. Real: uvicorn, sockets on loopback.
"""

import socket
import time

import pytest
import uvicorn

from composer_replication.coordinator.http_service import HttpService

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def application(scope, receive, send):
    if scope["type"] == "http":
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def service(monkeypatch):
    config = uvicorn.Config

    def limited(*arguments, **options):
        return config(*arguments, **options | {"timeout_keep_alive": 1})

    monkeypatch.setattr(uvicorn, "Config", limited)
    service = HttpService("127.0.0.1:0")
    service.start(application)
    yield service
    service.close()


def connect(service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=5)


def test_a_connection_with_requests_is_kept(service):
    with connect(service) as connection:
        for _ in range(5):
            connection.sendall(REQUEST)
            answer = b""
            while not answer.endswith(b"{}"):
                answer += connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(0.3)


@pytest.mark.parametrize("sent", [b"", REQUEST])
def test_a_connection_without_a_further_request_is_closed(service, sent):
    with connect(service) as connection:
        connection.sendall(sent)
        while connection.recv(1000):  # TimeoutError after 5 s
            pass
