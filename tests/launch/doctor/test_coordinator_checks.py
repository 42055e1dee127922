"""What ``doctor`` says of a coordinator. Run: pytest tests/launch/doctor/test_coordinator_checks.py

Real: the service and its lighthouse, HTTP and sockets on loopback.
"""

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from composer_replication.coordinator import client as client_module
from composer_replication.coordinator.server import Coordinator
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.doctor import coordinator as checks
from composer_replication.launch.doctor.coordinator import Found, check_coordinator
from composer_replication.launch.doctor.link import Link
from composer_replication.launch.doctor.results import State
from composer_replication.replica.options import ReplicaOptions

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    coordinator = Coordinator(
        DiLoCoSettings(),
        "x.yaml",
        num_replicas=2,
        state_dir=tmp_path_factory.mktemp("state"),
        bind="127.0.0.1:0",
        tokens=[TOKEN],
        model_section={"d_model": 8},
    )
    yield coordinator.address
    coordinator.shutdown()


@pytest.fixture(autouse=True)
def no_link(monkeypatch):
    """Transfers of up to 16 MiB take a second each, and one test makes them."""
    monkeypatch.setattr(checks, "measure_link", lambda *_: Link(1e9, 2e9, 0.001))


def asked_by(address, token=TOKEN, named=None, model=None, hostname="127.0.0.1", **options):
    return checks.Member(
        options=ReplicaOptions(coordinator_addr=address, **options),
        token=token,
        named=named or {},
        model=model or {},
        hostname=hostname,
        name_is_given=True,
    )


def examine(*arguments, **options):
    found = Found()
    results = list(check_coordinator(asked_by(*arguments, **options), found))
    return {result.name: result for result in results if result.state is not State.OK}, found


def test_a_group_that_fits_has_nothing_to_fix(address, monkeypatch):
    monkeypatch.undo()
    troubles, found = examine(address, replica_id="0", model={"d_model": 8})
    assert {name: result.fix for name, result in troubles.items()} == {
        "peers": "no replica group is in training"
    }
    assert found.info.settings == DiLoCoSettings()
    assert min(found.link.up, found.link.down) > 1e6 and 0 < found.link.round_trip_s < 1


def refused(address, name, *arguments, **options):
    result = examine(address, *arguments, **options)[0][name]
    assert result.state is State.FAILURE
    return result.value, result.fix


def test_a_coordinator_that_is_away():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    value, fix = refused(address, "coordinator")
    assert address in value and "correct COMPOSER_REPLICATION_COORDINATOR" in fix


def test_a_wrong_token(address):
    value, fix = refused(address, "coordinator", "wrong" * 5)
    assert "wrong token" in value and fix == "set COMPOSER_REPLICATION_TOKEN to this run's secret"


def test_other_settings(address):
    value, fix = refused(address, "run's settings", named={"sync_every": 7, "outer_lr": 0.1})
    assert "sync_every: 7 here, 100 there;  outer_lr: 0.1 here, 0.7 there" in value
    assert fix == "leave them out, or make them equal"


def test_another_model(address):
    value, fix = refused(address, "run's model", model={"d_model": 9})
    assert "model.d_model is 9 here, and 8 in this run" in value and "equal" in fix


def test_heartbeats_that_are_too_rare(address):
    value, fix = refused(address, "heartbeats", heartbeat_interval_s=2.0)
    assert "heartbeat_interval_s=2 is above half" in value and "Use at most 1.5" in fix


def test_another_version(address, monkeypatch):
    monkeypatch.setattr(client_module, "__version__", "0.0.9")
    value, fix = refused(address, "run's versions")
    assert "composer_replication 0.0.9 here, and 0.1.0 in this run" in value
    assert fix == "install the same version"


def test_a_name_that_is_taken(address):
    client = client_module.CoordinatorClient(address, TOKEN)
    registration = {
        "replica_id": "7", "session": "one", "host": "here", "world_size": 1,
        "composer_replication": client.info().version, "torchft": client.info().torchft,
        "model": [{"name": "a", "shape": [1], "dtype": "torch.float32"}],
    }  # fmt: skip
    client.register(registration)
    ended = threading.Event()

    def live():
        while not ended.wait(0.2):
            client.heartbeat("7", {"session": "one"})

    living = threading.Thread(target=live)
    living.start()
    value, fix = refused(address, "replica id", replica_id="7")
    ended.set()
    living.join()
    client.close()
    assert "a replica group '7' is alive" in value and "REPLICA_GROUP_ID of its own" in fix


def test_a_name_that_leads_elsewhere(address):
    value, fix = refused(address, "way back", hostname="127.0.0.2")
    assert "127.0.0.2 is 127.0.0.2 at the coordinator, and you are 127.0.0.1" in value
    assert "COMPOSER_REPLICATION_HOSTNAME" in fix


def test_without_a_token_nobody_is_asked_to_connect_back(tmp_path):
    coordinator = Coordinator(
        DiLoCoSettings(), "x.yaml", num_replicas=2, state_dir=tmp_path, bind="127.0.0.1:0"
    )
    troubles, _ = examine(coordinator.address, None)
    assert troubles["way back"].state is State.SKIPPED
    assert "set COMPOSER_REPLICATION_TOKEN" in troubles["way back"].fix
    troubles, _ = examine(coordinator.address, TOKEN)  # which this coordinator has none of
    assert troubles["way back"].state is State.WARNING
    assert "this run has no token" in troubles["way back"].value
    coordinator.shutdown()


def test_a_link_that_breaks_off(address, monkeypatch):
    def measure_link(*_):
        raise ConnectionError("reset by a proxy")

    monkeypatch.setattr(checks, "measure_link", measure_link)
    value, fix = refused(address, "link")
    assert "reset by a proxy" in value and "look for a proxy" in fix


class Earlier(BaseHTTPRequestHandler):
    """A coordinator of a version that has no connect-back."""

    info: bytes = b""

    def do_GET(self):
        body = self.info if self.path == "/v1/info" else b'{"detail": "Not Found"}'
        self.send_response(200 if self.path == "/v1/info" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_coordinator_of_an_earlier_version(address, monkeypatch):
    client = client_module.CoordinatorClient(address, TOKEN)
    monkeypatch.setattr(Earlier, "info", client.transfer("GET", "/v1/info"))
    client.close()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Earlier)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    troubles, found = examine(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    result = troubles["clock, way back, link"]
    assert result.state is State.WARNING and "Not Found" in result.value
    assert "install the same version" in result.fix and found.link is None


def test_without_the_extra_the_line_to_install_it_is_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "composer_replication.coordinator.client", None)
    real = checks.named_extra

    def named_extra(who, error):  # the module that is missing is one of ours here
        return real(who, ModuleNotFoundError(name="httpx"))

    monkeypatch.setattr(checks, "named_extra", named_extra)
    (result,) = examine("http://127.0.0.1:1")[0].values()
    assert result.state is State.WARNING and "needs httpx" in result.value
    assert result.fix == "pip install 'composer-replication[composer]'"
