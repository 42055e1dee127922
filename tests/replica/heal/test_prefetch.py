"""Fetching the state ahead of the quorum among strangers.

Run: pytest tests/replica/heal/test_prefetch.py.

Real: the lighthouse, torchft's manager servers, the heal servers, prefetch. The stranger knows the
lighthouse's address and not the token.
"""

import json
import threading
from contextlib import ExitStack
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
import torch
from scripted_state import ScriptedState
from torchft._torchft import ManagerClient, ManagerServer

from composer_replication.replica.heal.prefetch import Prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import read_status, start_lighthouse
from composer_replication.replica.process_group import host_store

LIMIT = timedelta(seconds=15)
STATE = {"outer_step": 4, "fragments": [{"theta": {"w": torch.arange(6.0)}}]}

pytestmark = pytest.mark.integration


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def lighthouse(stack):
    server = start_lighthouse(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500)
    stack.callback(server.shutdown)
    return server.address()


class Group:
    """A replica group's manager server, of which the lighthouse says what it likes."""

    def __init__(self, name, lighthouse, stack):
        self._store = host_store("127.0.0.1")
        self._server = ManagerServer(
            replica_id=f"{name}:uuid",
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr=f"127.0.0.1:{self._store.port}",
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=LIMIT,
            quorum_retries=0,
        )
        stack.callback(self._server.shutdown)
        self._client = ManagerClient(self._server.address(), connect_timeout=LIMIT)

    def join(self, step, heal_address):
        self._client._quorum(
            group_rank=0,
            step=step,
            checkpoint_metadata=heal_address,
            shrink_only=False,
            timeout=LIMIT,
            init_sync=False,
            commit_failures=0,
            reconfigure_handle=json.dumps({}),
        )


def all_join(*calls):
    threads = [threading.Thread(target=group.join, args=arguments) for group, *arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def transport(stack, token="secret"):
    made = HealTransport([token], "127.0.0.1", 5.0)
    stack.callback(made.shutdown)
    return made


def donor(stack):
    made = transport(stack)
    made.serve(lambda: 4, ScriptedState(STATE))
    return made


def fetch_ahead(stack, lighthouse):
    joiner = transport(stack)
    Prefetch(joiner, lighthouse_addr=lighthouse, rank=0, timeout=5.0).fetch()
    return joiner


class Relay(BaseHTTPRequestHandler):
    """Passes what a joiner asks on to an honest donor, over one connection, and keeps it all."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if not hasattr(self, "donor"):
            parts = urlsplit(self.server.donor)
            self.donor = HTTPConnection(parts.hostname, parts.port, timeout=5)
        headers = {k: v for k, v in self.headers.items() if k.startswith("X-")}
        self.donor.request("GET", self.path, headers=headers)
        answer = self.donor.getresponse()
        body = answer.read()
        self.server.answers.append((answer.status, self.path, body))
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.startswith("X-"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def relay(stack):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    server.answers = []
    return server


def test_a_stranger_that_relays_a_joiner_s_questions_learns_nothing(stack, lighthouse, relay):
    honest = donor(stack)
    relay.donor = honest.metadata()
    all_join(
        (Group("honest", lighthouse, stack), 4, honest.metadata()),
        # Of the highest step, so that joiners ask it first.
        (Group("stranger", lighthouse, stack), 10**6, f"http://127.0.0.1:{relay.server_port}"),
    )
    assert [member.step for member in read_status(lighthouse).members] == [4, 10**6]
    joiner = fetch_ahead(stack, lighthouse)
    assert [status for status, *_ in relay.answers] == [401, 403]
    assert len(joiner.downloads) == 1  # from the honest donor


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:99999999", "http://[bad", "", "http://127.0.0.1\r\nX: y:80"]
)
def test_a_stranger_s_odd_address_does_not_end_a_joiner(stack, lighthouse, address):
    honest = donor(stack)
    all_join(
        (Group("honest", lighthouse, stack), 4, honest.metadata()),
        (Group("stranger", lighthouse, stack), 10**6, address),
    )
    assert len(fetch_ahead(stack, lighthouse).downloads) == 1


def test_a_donor_that_dies_in_the_middle_is_followed_by_the_next(stack, lighthouse):
    dying, honest = donor(stack), donor(stack)

    def die():
        raise HTTPException("killed")

    dying.serve(
        lambda: 5, ScriptedState(die)
    )  # it answers /latest, and is gone when it makes the copy
    all_join(
        (Group("dying", lighthouse, stack), 5, dying.metadata()),
        (Group("honest", lighthouse, stack), 4, honest.metadata()),
    )
    assert len(fetch_ahead(stack, lighthouse).downloads) == 1


def test_a_donor_that_leaves_while_it_is_asked_is_no_reason_to_fail(stack, lighthouse):
    leaving = donor(stack)

    def leave():
        leaving.shutdown()
        raise KeyError("it has gone")

    leaving.serve(lambda: 4, ScriptedState(leave))
    all_join(
        (Group("a", lighthouse, stack), 4, leaving.metadata()),
        (Group("b", lighthouse, stack), 0, "http://127.0.0.1:1"),
    )
    assert fetch_ahead(stack, lighthouse).downloads == {}
