"""A group's side of the coordinator, when something else answers at its address.

Run: pytest tests/coordinator/test_client.py. Real: HTTP over loopback, the client and its threads.
"""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from composer_replication.coordinator.client import CoordinatorClient, RunInfo
from composer_replication.coordinator.client_http import (
    CoordinatorAwayError,
    RefusedByCoordinatorError,
)
from composer_replication.coordinator.membership import Membership
from composer_replication.data.commit_reports import CommitReports
from composer_replication.diloco.settings import DiLoCoSettings, SettingsMismatch
from composer_replication.replica.options import ReplicaOptions

GOOD = b'{"settings_version": 1, "unknown": []}'
ODD = {
    "a login page": (200, {"Content-Type": "text/html"}, b"<html>Log in</html>"),
    "an empty object": (200, {}, b"{}"),
    "a field of another type": (200, {}, b'{"settings_version": "x", "unknown": 3}'),
    "a list": (200, {}, b"[]"),
    "nothing": (200, {}, b""),
    "no content": (204, {}, b""),
    "a redirect": (302, {"Location": "http://127.0.0.1:1/"}, GOOD),
    "bad gzip": (200, {"Content-Encoding": "gzip"}, GOOD),
    "deep JSON": (200, {}, b"[" * 100_000),
    "another service's 404": (404, {"Content-Type": "text/html"}, b"<html>Not found</html>"),
    "a proxy's 502": (502, {"Content-Type": "text/html"}, b"<html>Bad gateway</html>"),
}


class Service:
    """Answers every request with ``answer``: status, headers, body."""

    def __init__(self) -> None:
        self.answer = (200, {}, GOOD)
        self.paths: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                service.paths.append(self.path)
                status, headers, body = service.answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if status != 204:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = respond

            def log_message(self, format: str, *arguments: object) -> None:
                del format, arguments

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


def info_of(service: Service) -> RunInfo:
    return RunInfo(
        settings=DiLoCoSettings(),
        settings_version=1,
        source="tiny.yaml",
        num_replicas=2,
        min_replicas=1,
        lighthouse_addr=service.address,
        heartbeat_timeout_s=3.0,
        version="0",
        torchft="0",
        model_section=None,
        outer_step=0,
    )


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("odd", ODD)
def test_what_is_not_the_coordinators_json_is_no_answer(service, odd):
    client = CoordinatorClient(service.address, "secret", patience_s=0.0)
    service.answer = ODD[odd]
    for ask in (
        client.info,
        lambda: client.settings(2),
        lambda: client.check_name_is_free("0", 3.0),
        lambda: client.register({}),
        lambda: client.heartbeat("0", {}),
        lambda: client.progress("c4"),
        lambda: client.lease(1, 0, 0),
        lambda: client.commit(1, [], [], 0.0),
    ):
        with pytest.raises(CoordinatorAwayError, match=service.address):
            ask()
    client.close()


@pytest.mark.parametrize("odd", ODD)
def test_heartbeats_go_on_after_an_odd_answer(service, odd):
    options = ReplicaOptions(coordinator_addr=service.address, heartbeat_interval_s=0.01)
    membership = Membership(options, info_of(service), "0")
    membership.join({}, world_size=1)
    service.answer = ODD[odd]
    service.paths.clear()
    wait_until(lambda: len(service.paths) >= 3)
    service.answer = (200, {}, b'{"settings_version": 7}')
    wait_until(lambda: membership.newest_version == 7)
    assert membership.refusal is None
    membership.leave()


@pytest.mark.parametrize("odd", ODD)
def test_a_report_of_a_sync_arrives_after_an_odd_answer(service, odd, monkeypatch):
    monkeypatch.setattr(CommitReports, "RETRY_S", 0.01)
    client = CoordinatorClient(service.address, "secret")
    reports = CommitReports(client)
    service.answer = ODD[odd]
    reports.tell(1, [[1, 2, 2]], [1])
    wait_until(lambda: len(service.paths) >= 3)
    service.answer = (200, {}, GOOD)
    wait_until(lambda: reports._newest is None)
    reports.close()
    client.close()


def test_a_refusal_of_the_coordinator_is_told_as_such(service):
    client = CoordinatorClient(service.address, "secret", patience_s=0.0)
    service.answer = (409, {}, b'{"detail": "a replica group \'0\' is alive"}')
    with pytest.raises(RefusedByCoordinatorError, match="'0' is alive") as error:
        client.register({})
    assert error.value.status == 409
    client.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_replicas": 3}, "num_replicas: 3 here, 2 there"),
        ({"min_replica_size": 2}, "min_replica_size: 2 here, 1 there"),
        ({"sync_every": 7}, "sync_every: 7 here, 100 there"),
    ],
)
def test_a_config_that_names_another_value_than_the_coordinator_is_refused(service, given, told):
    with pytest.raises(SettingsMismatch, match=told):
        info_of(service).check_given(given, service.address)


def test_a_config_that_names_the_same_or_nothing_is_accepted(service):
    info = info_of(service)
    info.check_given({"num_replicas": 2, "min_replica_size": 1}, service.address)
    info.check_given({"num_replicas": None, "timeout": 5.0}, service.address)
