"""Silent connections at each of our ports: what they cost the process, and those who belong there.

Run: pytest tests/replica/test_connections.py

Real: the servers, their clients, sockets on loopback. The strangers know the port and no token.
"""

import contextlib
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest
import uvicorn
from forked_commands import ForkedCommand
from harness.certificate import make_certificate

from composer_replication.coordinator import http_service
from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.coordinator.http_service import HttpService, Listener
from composer_replication.replica.addresses import host_and_port
from composer_replication.replica.peer_client import PeerClient
from composer_replication.replica.peer_server import MOST_UNPROVEN
from composer_replication.replica.rendezvous import SyncAlarm
from composer_replication.util import connections
from composer_replication.util.connections import Strangers, raise_file_limit


@contextlib.contextmanager
def silent_connections(port, count, per_s=100_000.0):
    """Keep so many silent connections to a port: those that are closed are opened again."""
    ends, opened = threading.Event(), threading.Event()

    def keep():
        with selectors.DefaultSelector() as open_ones:
            pause_s = 0.0
            while not ends.wait(pause_s):
                if len(open_ones.get_map()) < count:
                    connection = socket.create_connection(("127.0.0.1", port), 5.0)
                    open_ones.register(connection, selectors.EVENT_READ)
                else:
                    opened.set()
                for key, _ in open_ones.select(0):
                    open_ones.unregister(key.fileobj)
                    key.fileobj.close()
                    opened.set()  # the server has as many as it takes
                pause_s = 1 / per_s
            for key in list(open_ones.get_map().values()):
                key.fileobj.close()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert opened.wait(60)
        yield
    finally:
        ends.set()
        thread.join()


def asked_member(server):
    server.answers["latest"] = lambda: [4]
    member = PeerClient(["secret"], "joiner", 5.0)

    def ask():
        assert member.ask(server.address, "latest") == [4]

    return host_and_port(server.address)[1], ask, MOST_UNPROVEN


async def application(scope, receive, send):
    length = [(b"content-length", b"8")]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": b'{"ok":1}'})


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@contextlib.contextmanager
def coordinator(**certificate):
    listening = Listener("127.0.0.1:0")
    service = HttpService(application, listening, **certificate)
    with pytest.MonkeyPatch.context() as patch:
        if certificate:
            patch.setenv("SSL_CERT_FILE", str(certificate["ssl_certfile"]))
        scheme = "https" if certificate else "http"
        client = CoordinatorClient(f"{scheme}://127.0.0.1:{listening.port}", "secret")
    yield listening.port, lambda: client.ask("GET", "/"), http_service.MOST_CONNECTIONS
    client.close()
    service.close()


@pytest.fixture(params=["peer server", "coordinator", "coordinator with HTTPS"])
def server(request, start_server, ends):
    """A port, a request of somebody who belongs there, and how many connections are kept."""
    if request.param == "peer server":
        return asked_member(start_server())
    has_tls = request.param == "coordinator with HTTPS"
    certificate = request.getfixturevalue("certificate") if has_tls else {}
    return ends.enter_context(coordinator(**certificate))


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_strangers_keep_no_member_out_and_take_few_files(server):
    port, ask, most = server
    before = open_files()
    with silent_connections(port, 500):
        for _ in range(5):
            ask()
        # Each is a file at both of its ends. A few are on their way.
        assert open_files() - before < 500 + most + 150
    ask()


@pytest.mark.alone
@pytest.mark.parametrize(("count", "per_s"), [(75, 23.0), (300, 700.0), (3000, 1000.0)])
def test_a_member_is_answered_within_a_second(server, count, per_s):
    raise_file_limit()
    port, ask, _ = server
    with silent_connections(port, count, per_s):
        for _ in range(10):
            began = time.monotonic()
            ask()
            assert time.monotonic() - began < 1.0
            time.sleep(0.2)


def test_strangers_at_its_board_are_no_alarm(start_server, monkeypatch):
    monkeypatch.setattr(SyncAlarm, "POLL_S", 0.02)
    board = start_server().address
    alarm = SyncAlarm(partial(PeerClient(["secret"], "", 5.0).ask, board), 1)
    with silent_connections(host_and_port(board)[1], 300):
        for _ in range(20):
            assert alarm.age_s() is None
            time.sleep(0.02)
    alarm.close()


class Connection:
    """Stands for a socket: it differs from all others, and knows whether it has been shut down."""

    def __init__(self):
        self.is_shut_down = False

    def fileno(self):
        return 3

    def shutdown(self, how):
        self.is_shut_down = True


def test_the_oldest_of_the_host_with_most_goes_first():
    strangers = Strangers(4)
    added = [Connection() for _ in range(6)]
    for connection, host in zip(added, "abbaca", strict=True):
        strangers.add(connection, host)
    # The fifth finds a, b, b, a; the sixth finds b, b, a, c.
    assert [c.is_shut_down for c in added] == [True, True, False, False, False, False]


@pytest.mark.parametrize(("hard", "raised"), [(20_000, 20_000), (1 << 20, 1 << 16), (1024, None)])
def test_the_soft_limit_of_files_is_raised_as_far_as_is_sensible(monkeypatch, hard, raised):
    seen = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: seen.append(limits))
    raise_file_limit()
    assert seen == ([] if raised is None else [(raised, hard)])


TRAINER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from composer_replication.replica.factory import make_manager
manager = make_manager(replica_id="a", lighthouse_addr=sys.argv[1], hostname="127.0.0.1")
manager._pg.get_reconfigure_handle()  # its store listens from now on
print("ready", flush=True)
sys.stdin.readline()
manager.store.set("a", "b")
print(manager.store.get("a"), flush=True)
os._exit(0)
"""


@pytest.mark.integration
def test_a_trainer_outlives_more_connections_than_its_soft_limit_of_files(start_lighthouse):
    """torch's stores and torchft's manager bound none, and end the process without a file."""
    command = [sys.executable, "-c", TRAINER, start_lighthouse()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ForkedCommand(command, **pipes) as trainer, contextlib.ExitStack() as strangers:
        assert trainer.stdout.readline() == "ready\n"
        listening = psutil.Process(trainer.pid).net_connections("tcp")
        ports = {each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN}
        assert len(ports) == 4  # two stores, manager, peer server
        for port in ports:
            for _ in range(300):
                strangers.enter_context(socket.create_connection(("127.0.0.1", port), 5.0))
        said, _ = trainer.communicate("go on\n", timeout=60)
        assert (trainer.returncode, said) == (0, "b'b'\n")


REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def idle_connection(monkeypatch, ends):
    """A connection to a coordinator that closes those on which nothing comes for a second."""
    config, short = uvicorn.Config, {"timeout_keep_alive": 1}
    monkeypatch.setattr(uvicorn, "Config", lambda app, **more: config(app, **more | short))
    port, *_ = ends.enter_context(coordinator())
    return ends.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))


@pytest.mark.slow
def test_a_connection_with_requests_is_kept(idle_connection):
    for _ in range(5):
        idle_connection.sendall(REQUEST)
        answer = b""
        while not answer.endswith(b'{"ok":1}'):
            answer += idle_connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        time.sleep(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", REQUEST])
def test_a_connection_without_a_further_request_is_closed(idle_connection, sent):
    idle_connection.sendall(sent)
    while idle_connection.recv(1000):  # TimeoutError after 5 s
        pass


def test_rejections_are_counted_until_they_are_logged_again(monkeypatch):
    rejections = connections.RateLimitedCount()
    assert [rejections.count() for _ in range(4)] == [1, 0, 0, 0]
    monkeypatch.setattr(connections, "LOG_EVERY_S", 0.0)
    assert rejections.count() == 4
