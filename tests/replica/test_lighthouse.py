"""Is there a lighthouse at the address? Run: pytest tests/replica/test_lighthouse.py

Real: sockets on this machine, and in the last tests torchft's lighthouse.
"""

import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from composer_replication.replica.lighthouse import check_lighthouse, read_status, start_lighthouse


@pytest.fixture
def closed_port():
    """A port at which nothing listens, and which nobody else is given meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(
    "address",
    ["", "localhost:29510", "localhost", "http://localhost", "http://:29510", "http://a:port"],
)
def test_an_address_of_another_form_is_refused_with_the_right_one(address):
    with pytest.raises(ValueError, match="use http://host:port, as the lighthouse says") as caught:
        check_lighthouse(address, limit_s=60.0)
    assert f"lighthouse_addr={address!r}" in str(caught.value)


@pytest.mark.alone
def test_where_nothing_listens_the_error_has_the_address_and_the_fix(closed_port):
    address = f"http://127.0.0.1:{closed_port}"
    began = time.monotonic()
    with pytest.raises(ConnectionError) as caught:
        check_lighthouse(address, limit_s=0.3)
    assert 0.3 <= time.monotonic() - began < 5.0
    assert f"no lighthouse answers at {address} (" in str(caught.value)
    assert "torchft_lighthouse --min_replicas 1" in str(caught.value)
    assert "composer-replication launch" in str(caught.value)


def test_a_host_without_an_address_is_named_too():
    with pytest.raises(ConnectionError, match=r"at http://no-such-host\.invalid:29510 \("):
        check_lighthouse("http://no-such-host.invalid:29510", limit_s=0.1)


def test_a_lighthouse_that_is_still_starting_is_waited_for():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    starting = threading.Timer(0.4, server.listen)
    starting.start()
    try:
        began = time.monotonic()
        check_lighthouse(f"http://127.0.0.1:{server.getsockname()[1]}", limit_s=30.0)
        assert time.monotonic() - began >= 0.3
    finally:
        starting.join()
        server.close()


def test_asking_needs_neither_torch_nor_torchft():
    code = (
        "import sys, composer_replication.replica.lighthouse; "
        "print(sorted({'torch', 'torchft', 'composer'} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


@pytest.mark.integration
def test_our_own_lighthouse_answers_until_it_is_shut_down():
    lighthouse = start_lighthouse()
    address = lighthouse.address()
    check_lighthouse(address, limit_s=5.0)
    lighthouse.shutdown()  # returns before the port is closed
    deadline = time.monotonic() + 60.0
    with pytest.raises(ConnectionError):
        while time.monotonic() < deadline:
            check_lighthouse(address, limit_s=0.05)
            time.sleep(0.05)


@pytest.mark.integration
def test_two_lighthouses_on_one_machine_take_different_ports():
    lighthouses = [start_lighthouse() for _ in range(2)]
    try:
        assert lighthouses[0].address() != lighthouses[1].address()
    finally:
        for lighthouse in lighthouses:
            lighthouse.shutdown()


@pytest.mark.integration
def test_the_status_page_tells_members_heartbeats_and_what_it_waits_for():
    # torchft has no other place that tells them without making the asker a member.
    from composer_replication.replica.factory import make_manager

    lighthouse = start_lighthouse()
    try:
        assert read_status(lighthouse.address()).members == ()
        manager = make_manager(replica_id="a", lighthouse_addr=lighthouse.address())
        manager.load_state_dict({"step": 7, "batches_committed": 7})
        manager.start_quorum()
        status = read_status(lighthouse.address())
        manager.shutdown()
    finally:
        lighthouse.shutdown()
    [member] = status.members
    assert member.replica_id.startswith("a:") and member.step == 7
    assert member.manager_addr.startswith("http://")
    assert status.heard_of == {member.replica_id}
    assert "only have 0 participants" in status.situation


@pytest.mark.integration
def test_a_group_whose_heartbeat_has_stopped_is_not_alive():
    from torchft.coordination import LighthouseClient

    lighthouse = start_lighthouse(heartbeat_timeout_ms=300)
    try:
        client = LighthouseClient(lighthouse.address(), timedelta(seconds=5))
        client.heartbeat("a:1")
        time.sleep(0.5)
        client.heartbeat("b:1")
        status = read_status(lighthouse.address())
    finally:
        lighthouse.shutdown()
    assert status.heard_of == {"a:1", "b:1"} and status.alive == {"b:1"}


def test_a_lighthouse_that_is_away_has_no_members_and_says_so():
    status = read_status("http://localhost:1", timeout_s=0.5)
    assert status.members == () and "is away" in status.situation


class StatusPage(BaseHTTPRequestHandler):
    """What a lighthouse says of one group that is alive."""

    def do_GET(self):
        page = b'<li class="heartbeat "> a:uuid: seen 0.1s ago</li>'
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *arguments):
        pass


def test_a_proxy_in_the_environment_is_not_asked_for_the_status_page(monkeypatch, closed_port):
    server = HTTPServer(("127.0.0.1", 0), StatusPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    status = read_status(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    assert status.alive == {"a:uuid"}
