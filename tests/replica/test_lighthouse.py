"""Is there a lighthouse at the address? Run: pytest tests/replica/test_lighthouse.py

Real: sockets on this machine, and in the last tests torchft's lighthouse.
"""

import gc
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context

import pytest
from lighthouse_page import heard_of
from strange_servers import strange_server
from torchft.coordination import LighthouseClient, LighthouseServer
from waiting import stop_accepting

from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import (
    LastingServer,
    can_connect,
    check_lighthouse,
    read_status,
    start_lighthouse,
)


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


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_where_nothing_listens_the_error_has_the_address_and_the_fix(closed_port, host):
    address = f"http://{host}:{closed_port}"
    with pytest.raises(ConnectionError) as caught:
        check_lighthouse(address, limit_s=0.1)
    assert f"no lighthouse answers at {address} (" in str(caught.value)
    assert "torchft_lighthouse --min_replicas 1" in str(caught.value)
    assert "composer-replication launch" in str(caught.value)


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


@pytest.mark.integration
def test_the_status_page_tells_members_heartbeats_and_what_it_waits_for(start_lighthouse):
    # torchft has no other place that tells them without making the asker a member.
    address = start_lighthouse()
    assert read_status(address).members == ()
    manager = make_manager(replica_id="a", lighthouse_addr=address)
    manager.load_state_dict({"step": 7, "batches_committed": 7})
    manager.start_quorum()
    status = read_status(address)
    manager.shutdown()
    [member] = status.members
    assert member.replica_id.startswith("a:") and member.step == 7
    assert member.manager_addr.startswith("http://")
    assert status.alive == heard_of(address) == {member.replica_id}
    assert "only have 0 participants" in status.situation


@pytest.mark.integration
def test_a_group_whose_heartbeat_has_stopped_is_not_alive_and_no_proxy_is_asked(
    start_lighthouse, monkeypatch, closed_port
):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    address = start_lighthouse(heartbeat_timeout_ms=300)
    client = LighthouseClient(address, timedelta(seconds=5))
    client.heartbeat("a:1")
    time.sleep(0.5)
    client.heartbeat("b:1")
    assert read_status(address).alive == {"b:1"}
    assert heard_of(address) == {"a:1", "b:1"}


def test_a_lighthouse_that_is_away_has_no_members_and_says_so():
    status = read_status("http://localhost:1")
    assert status.members == () and "is away" in status.situation


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n<b>a:1</b>", "IncompleteRead"),
    ],
)
def test_what_is_no_page_of_a_lighthouse_is_one_that_is_away(said, reason):
    def answer(connection):
        connection.recv(1000)
        connection.sendall(said)

    with strange_server(answer) as address:
        status = read_status(f"http://{address}")
    assert status.members == () and f"is away ({reason}(" in status.situation
    assert len(status.situation.splitlines()) == 1, "it becomes a line of the log"


# ---- a lighthouse that has stopped accepting ---------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])
def test_a_server_that_refuses_connections_is_started_again_at_its_port(host, caplog, ends):
    server = LastingServer(lambda bind: start_lighthouse(bind=bind), f"{host}:0")
    port = int(server.address().rpartition(":")[2])
    idle = ends.enter_context(socket.create_connection(("127.0.0.1", port)))
    server.restart_if_it_refuses("The lighthouse")
    assert not caplog.messages

    stop_accepting(port)
    assert not can_connect("127.0.0.1", port)
    server.restart_if_it_refuses("The lighthouse")
    assert read_status(f"http://127.0.0.1:{port}").situation.startswith("New quorum not ready")
    # Groups with a connection to the old one would be in other quorums than the rest.
    idle.settimeout(60.0)
    with suppress(ConnectionResetError):
        assert idle.recv(1) == b""
    server.restart_if_it_refuses("The lighthouse")
    assert caplog.messages == [
        "The lighthouse accepts no connections any more, and is started again"
    ]
    server.shutdown()


def test_a_server_that_cannot_be_started_yet_is_tried_again():
    starts = []

    def start(bind):
        starts.append(bind)
        if len(starts) == 2:
            raise OSError("no file descriptor is left")
        return start_lighthouse(bind=bind)

    server = LastingServer(start, "127.0.0.1:0")
    port = int(server.address().rpartition(":")[2])
    stop_accepting(port)
    with pytest.raises(OSError, match="no file descriptor is left"):
        server.restart_if_it_refuses("The lighthouse")
    server.restart_if_it_refuses("The lighthouse")
    assert can_connect("127.0.0.1", port)
    server.shutdown()


def test_a_forked_process_waits_for_no_server_that_it_would_collect():
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    gc.disable()  # it is collected in the child, if at all
    try:
        cycle: list[object] = [lighthouse]
        cycle.append(cycle)
        del cycle, lighthouse
        child = get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(10.0)
        assert child.exitcode == 0
    finally:
        gc.enable()
        child.kill()
