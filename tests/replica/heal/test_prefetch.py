"""Fetching the state ahead of the quorum among strangers.

Run: pytest tests/replica/heal/test_prefetch.py.

Real: the peer servers, prefetch. The stranger is in the quorum and does not know the token. Faked
are the lighthouse's page and torchft's managers; tests/integration/test_joins.py has the real ones.
"""

import socket
import time
from http.client import HTTPException
from typing import NamedTuple

import pytest
import torch
from scripted_state import ScriptedState
from strange_servers import strange_server

from composer_replication.replica.addresses import host_and_port
from composer_replication.replica.heal import prefetch
from composer_replication.replica.heal.prefetch import Prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import LighthouseStatus, Member
from composer_replication.replica.peer_client import receive, send

STATE = {"outer_step": 4, "fragments": [{"theta": {"w": torch.arange(6.0)}}]}


@pytest.fixture
def has_quorum(monkeypatch):
    """Have a last quorum of these members, each with its step and what its manager says."""

    def form(*members):
        told = {f"http://localhost:{number}": member for number, member in enumerate(members, 1)}
        found = tuple(Member(f"{a}:1", step, a) for a, (step, _) in told.items())
        status = LighthouseStatus(found, alive=frozenset(each.replica_id for each in found))
        monkeypatch.setattr(prefetch, "read_status", lambda *_: status)
        monkeypatch.setattr(prefetch, "ManagerClient", lambda a, **_: FakeManager(told[a][1]))
        connects, managers = prefetch.can_connect, range(1, len(told) + 1)
        monkeypatch.setattr(prefetch, "can_connect", lambda *a: a[1] in managers or connects(*a))

    return form


class FakeManager(NamedTuple):
    """A torchft manager's server, which tells where its rank's state is."""

    address: str

    def _checkpoint_metadata(self, rank, timeout):
        return self.address


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
def fetch_ahead(transport):
    def fetch():
        joiner = transport()
        Prefetch(joiner, lighthouse_addr="http://localhost:1", rank=0, timeout=5.0).fetch()
        return joiner

    return fetch


def test_a_stranger_that_relays_a_joiner_s_questions_learns_nothing(
    ends, has_quorum, donor, fetch_ahead
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
    # The stranger is of the highest step, so that joiners ask it first.
    has_quorum((4, honest.metadata()), (10**6, address))
    joiner = fetch_ahead()
    assert answers == [{"error": "rejected"}]
    assert len(joiner.downloads) == 1  # from the honest donor


@pytest.mark.parametrize("address", ["127.0.0.1:99999999", "[bad:1", "", "127.0.0.1\r\nX: y:80"])
def test_a_stranger_s_odd_address_does_not_end_a_joiner(has_quorum, donor, fetch_ahead, address):
    honest = donor()
    has_quorum((4, honest.metadata()), (10**6, address))
    assert len(fetch_ahead().downloads) == 1


def test_a_donor_that_dies_in_the_middle_is_followed_by_the_next(has_quorum, donor, fetch_ahead):
    def die():  # it says what it has, and is gone when it makes the copy
        raise HTTPException("killed")

    dying, honest = donor(die, 5), donor()
    has_quorum((5, dying.metadata()), (4, honest.metadata()))
    assert len(fetch_ahead().downloads) == 1


def test_a_donor_that_leaves_while_it_is_asked_is_no_reason_to_fail(has_quorum, donor, fetch_ahead):
    def leave():
        leaving.shutdown()
        raise KeyError("it has gone")

    leaving = donor(leave)
    has_quorum((4, leaving.metadata()), (0, "127.0.0.1:1"))
    assert fetch_ahead().downloads == {}
