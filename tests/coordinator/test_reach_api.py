"""What ``doctor`` asks a coordinator: to connect back, its time, and bytes to measure a link.

Run: pytest tests/coordinator/test_reach_api.py. Real: the service, HTTP and sockets on loopback.
"""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from composer_replication.coordinator import reach_api
from composer_replication.coordinator.admission import MAX_BODY
from composer_replication.coordinator.audit import AUDIT
from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.coordinator.client_http import (
    CoordinatorAwayError,
    RejectedByCoordinatorError,
)
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings

PROOF = "0123456789abcdef" * 2


@contextmanager
def serving(state_dir, bind="127.0.0.1:0", tokens=("secret",)):
    coordinator = Coordinator(
        DiLoCoSettings(), "x.yaml", num_replicas=2, state_dir=state_dir, bind=bind, tokens=tokens
    )
    client = CoordinatorClient(
        f"http://127.0.0.1:{coordinator.address.rpartition(':')[2]}", *tokens or [None]
    )
    try:
        yield client.with_limits(retry_s=0.0, timeout_s=20.0)
    finally:
        client.close()
        coordinator.shutdown()


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("coordinator")


@pytest.fixture(scope="module")
def client(state_dir):
    with serving(state_dir, bind="[::]:0") as client:
        yield client


@contextmanager
def listening(answer, host="127.0.0.1"):
    """A port that answers one connection after the other with these bytes."""
    listener = socket.create_server((host, 0))
    accepted = []

    def serve():
        while True:
            try:
                connection, address = listener.accept()
            except OSError:
                return
            accepted.append(address)
            with connection:
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        yield listener.getsockname()[1], accepted
        listener.shutdown(socket.SHUT_RDWR)


def test_the_caller_is_reached_under_its_name_on_a_socket_for_both_families(client):
    with listening(PROOF.encode()) as (port, accepted):
        # The service sees an IPv4 caller as ::ffff:127.0.0.1.
        assert client.why_unreached("127.0.0.1", port, PROOF) == ""
        assert client.why_unreached("localhost", port, PROOF) == ""
        assert len(accepted) == 2


def test_why_a_caller_cannot_be_reached(client, state_dir):
    with listening(b"SSH-2.0-x" * 9) as (port, _):
        assert client.why_unreached("127.0.0.1", port, PROOF) == (
            "another program answers at 127.0.0.1"
        )
    problem = client.why_unreached("127.0.0.1", port, PROOF)
    assert f"no connection from the coordinator to 127.0.0.1 port {port} (" in problem
    problem = client.why_unreached("no-such-host.invalid", port, PROOF)
    assert "no-such-host.invalid does not resolve at the coordinator" in problem
    lines = [json.loads(line) for line in (state_dir / AUDIT).read_text().splitlines()]
    assert lines[-1]["host"] == "no-such-host.invalid" and lines[-1]["port"] == port


def test_nobody_but_the_caller_is_connected_to(client):
    """127.0.0.2 is another host, as far as the service can tell."""
    with listening(PROOF.encode(), "127.0.0.2") as (port, accepted):
        assert client.why_unreached("127.0.0.2", port, PROOF) == (
            "127.0.0.2 is 127.0.0.2 at the coordinator, and you are 127.0.0.1"
        )
        assert not accepted


def test_a_proxy_on_another_machine_cannot_name_a_caller(client):
    """uvicorn takes the caller from X-Forwarded-For, but only if a proxy on loopback says so."""
    with listening(PROOF.encode(), "127.0.0.2") as (port, accepted):
        body = {"host": "127.0.0.2", "port": port, "proof": PROOF}
        headers = {"Authorization": "Bearer secret", "X-Forwarded-For": "127.0.0.2"}
        transport = httpx.HTTPTransport(local_address="127.0.0.3")
        with httpx.Client(transport=transport) as other:
            answer = other.post(f"{client.address}/v1/reach", json=body, headers=headers)
        assert answer.json()["problem"].endswith("and you are 127.0.0.3") and not accepted


@pytest.mark.parametrize("port", [22, 80, 1023, 65536, 0, -1])
def test_ports_that_no_group_listens_on_are_refused(client, port):
    with pytest.raises(RejectedByCoordinatorError, match="port"):
        client.why_unreached("127.0.0.1", port, PROOF)


def test_who_lacks_the_token_gets_nothing(client):
    stranger = CoordinatorClient(client.address, "wrong", retry_s=0.0)
    for ask in (
        lambda: stranger.why_unreached("127.0.0.1", 2000, PROOF),
        stranger.clock,
        lambda: stranger.send_bytes(b"x" * 100),
        lambda: stranger.receive_bytes(100),
    ):
        with pytest.raises(RejectedByCoordinatorError, match="wrong token"):
            ask()
    stranger.close()


def test_a_run_without_a_token_connects_to_nobody(tmp_path):
    with serving(tmp_path, tokens=()) as client, listening(PROOF.encode()) as (port, accepted):
        with pytest.raises(RejectedByCoordinatorError, match="this run has no token"):
            client.why_unreached("127.0.0.1", port, PROOF)
        assert not accepted
        assert client.clock()[1] == "127.0.0.1"


def test_a_caller_that_is_silent_is_not_waited_for_long(client, monkeypatch):
    monkeypatch.setattr(reach_api, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the connection stays in its backlog
        problem = client.why_unreached("127.0.0.1", silent.getsockname()[1], PROOF)
    assert "timed out" in problem


def test_few_callers_at_a_time_keep_threads_of_the_service_waiting(client, monkeypatch):
    monkeypatch.setattr(reach_api, "CONNECT_TIMEOUT_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(4) as pool:

        def ask():
            return client.why_unreached("127.0.0.1", silent.getsockname()[1], PROOF)

        asked = [pool.submit(ask) for _ in range(reach_api.AT_ONCE)]
        connections = [silent.accept()[0] for _ in asked]
        with pytest.raises(RejectedByCoordinatorError, match="other machines are being checked"):
            ask()
        assert client.info().num_replicas == 2
        for connection in connections:
            connection.close()
        assert {each.result() for each in asked} == {"another program answers at 127.0.0.1"}


def test_the_time_and_the_address_of_the_caller(client):
    before = time.time()
    theirs, address = client.clock()
    assert before - 1 < theirs < time.time() + 1 and address.endswith("127.0.0.1")


def test_bytes_travel_both_ways_up_to_a_limit(client):
    client.send_bytes(b"x" * 3_000_000)
    assert client.transfer("POST", "/v1/reach/bytes", b"x" * 70_000) == b'{"bytes":70000}'
    assert len(client.transfer("GET", "/v1/reach/bytes?size=70000")) == 70_000
    with pytest.raises(RejectedByCoordinatorError, match="size"):
        client.receive_bytes(reach_api.LARGEST + 1)
    with pytest.raises(RejectedByCoordinatorError, match="the body is larger than 32 MiB"):
        client.send_bytes(bytes(MAX_BODY + 1))


def test_bytes_of_another_service_are_no_answer():
    with listening(b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n") as other:
        client = CoordinatorClient(f"http://127.0.0.1:{other[0]}", None, retry_s=0.0)
        with pytest.raises(CoordinatorAwayError, match="is not its answer"):
            client.receive_bytes(100)
        client.close()
