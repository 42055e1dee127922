"""The coordinator's HTTP server against silent and slow clients.

Run: pytest tests/coordinator/test_http_service.py. Real: uvicorn, sockets on loopback.
"""

import logging
import resource
import socket
import subprocess
import sys
import time

import httpx
import pytest

from composer_replication.coordinator import connections
from composer_replication.coordinator.http_service import HttpService

pytestmark = pytest.mark.alone  # silence of half a second closes a connection

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


async def application(scope, receive, send):
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(connections, "RECEIVE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT_S", 0.7)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    service = HttpService("127.0.0.1:0")
    service.start(application)
    yield service
    service.close()


def connect(service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=5)


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed a connection; False if it sends something or goes on."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD, HEAD + b"\r\n" + b"x" * 50])
def test_a_request_that_is_not_complete_in_time_ends_its_connection(service, sent):
    with connect(service) as connection:
        connection.sendall(sent)
        assert is_closed(connection)


def test_a_byte_now_and_then_does_not_give_a_request_more_time(service):
    with connect(service) as connection:
        began = time.monotonic()
        with pytest.raises(OSError):
            for byte in HEAD * 100:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - began < 3


def test_a_connection_with_complete_requests_is_kept(service):
    with connect(service) as connection:
        for _ in range(5):
            connection.sendall(REQUEST)
            answer = b""
            while not answer.endswith(b"{}"):
                answer += connection.recv(1000)
            assert answer.startswith(b"HTTP/1.1 200")
            time.sleep(0.3)


def test_silent_connections_do_not_keep_a_group_out(service):
    silent = [connect(service) for _ in range(60)]
    began = time.monotonic()
    assert httpx.get(f"http://127.0.0.1:{service.port}/").status_code == 200
    assert time.monotonic() - began < 1
    # The oldest had to make room, long before their time was over.
    silent[0].settimeout(0.1)
    assert is_closed(silent[0])
    for connection in silent:
        connection.close()


def test_a_shortage_of_file_descriptors_is_logged_once_a_minute(caplog):
    logging.getLogger("asyncio").addFilter(connections._OncePerMinute())
    for _ in range(100):
        logging.getLogger("asyncio").error("socket.accept() out of system resource\nsocket: ...")
    logging.getLogger("asyncio").error("something else")
    assert [record.message.split("\n")[0] for record in caplog.records] == [
        "socket.accept() out of system resource",
        "something else",
    ]


def test_more_file_descriptors_are_asked_for():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 512:
        pytest.skip("the hard limit is low")
    program = (
        "import resource as r; from composer_replication.coordinator.http_service import *; "
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (256, hard)); "
        "HttpService('127.0.0.1:0').close(); print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(found.stdout) > 256, found.stderr
