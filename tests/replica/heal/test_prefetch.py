"""Fetching the state ahead of the quorum among strangers.

Run: pytest tests/replica/heal/test_prefetch.py.

Real: the lighthouse, torchft's manager servers, the peer servers, prefetch. The stranger knows the
lighthouse's address and not the token.
"""

import json
import socket
import threading
import time
from datetime import timedelta
from http.client import HTTPException

import pytest
import torch
from scripted_state import ScriptedState
from strange_servers import strange_server
from torchft._torchft import ManagerClient, ManagerServer

from composer_replication.replica.addresses import host_and_port
from composer_replication.replica.heal.prefetch import Prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.messages import receive, send
from composer_replication.replica.process_group import host_store

LIMIT = timedelta(seconds=15)
STATE = {"outer_step": 4, "fragments": [{"theta": {"w": torch.arange(6.0)}}]}

pytestmark = pytest.mark.integration


@pytest.fixture
def lighthouse(start_lighthouse):
    return start_lighthouse(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500)


@pytest.fixture
def group(lighthouse, ends):
    return lambda name: Group(name, lighthouse, ends)


@pytest.fixture
def transport(start_server):
    return lambda: HealTransport(start_server(), 5.0)


@pytest.fixture
def donor(transport):
    def make(state=STATE, step=4):
        made = transport()
        made.serve(lambda: step, ScriptedState(state))
        return made

    return make


@pytest.fixture
def fetch_ahead(transport, lighthouse):
    def fetch():
        joiner = transport()
        Prefetch(joiner, lighthouse_addr=lighthouse, rank=0, timeout=5.0).fetch()
        return joiner

    return fetch


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


def test_a_stranger_that_relays_a_joiner_s_questions_learns_nothing(
    ends, lighthouse, group, donor, fetch_ahead
):
    honest, answers = donor(), []

    def relay(joiner):
        """Pass what a joiner asks on to an honest donor, over one connection, and keep it all."""
        until = time.monotonic() + 5
        with socket.create_connection(host_and_port(honest.metadata()), 5) as asked:
            send(joiner, receive(asked, 1000, until), until)
            send(asked, receive(joiner, 1000, until), until)
            answers.append(receive(asked, 1000, until))
            send(joiner, answers[-1], until)

    address = ends.enter_context(strange_server(relay))
    all_join(
        (group("honest"), 4, honest.metadata()),
        # Of the highest step, so that joiners ask it first.
        (group("stranger"), 10**6, address),
    )
    assert [member.step for member in read_status(lighthouse).members] == [4, 10**6]
    joiner = fetch_ahead()
    assert answers == [{"error": "rejected"}]
    assert len(joiner.downloads) == 1  # from the honest donor


@pytest.mark.parametrize("address", ["127.0.0.1:99999999", "[bad:1", "", "127.0.0.1\r\nX: y:80"])
def test_a_stranger_s_odd_address_does_not_end_a_joiner(group, donor, fetch_ahead, address):
    honest = donor()
    all_join(
        (group("honest"), 4, honest.metadata()),
        (group("stranger"), 10**6, address),
    )
    assert len(fetch_ahead().downloads) == 1


def test_a_donor_that_dies_in_the_middle_is_followed_by_the_next(group, donor, fetch_ahead):
    def die():  # it says what it has, and is gone when it makes the copy
        raise HTTPException("killed")

    dying, honest = donor(die, 5), donor()
    all_join((group("dying"), 5, dying.metadata()), (group("honest"), 4, honest.metadata()))
    assert len(fetch_ahead().downloads) == 1


def test_a_donor_that_leaves_while_it_is_asked_is_no_reason_to_fail(group, donor, fetch_ahead):
    def leave():
        leaving.shutdown()
        raise KeyError("it has gone")

    leaving = donor(leave)
    all_join((group("a"), 4, leaving.metadata()), (group("b"), 0, "127.0.0.1:1"))
    assert fetch_ahead().downloads == {}
