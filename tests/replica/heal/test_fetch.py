"""Fetching the state ahead of the quorum, also among strangers.

Run: pytest tests/replica/heal/test_fetch.py.

Real: the peer servers, the transports. The stranger is in the quorum and does not know the token.
Faked are the lighthouse's page and torchft's managers; tests/integration/test_joins.py has the real
ones.
"""

import socket
import threading
import time
import weakref
from http.client import HTTPException

import pytest
import torch
from replica.heal.groups import LIMIT, Group
from scripted_state import ScriptedState
from strange_servers import strange_server

from composer_replication.diloco.torchft_api import STATE_NAME
from composer_replication.replica.addresses import host_and_port
from composer_replication.replica.heal import transport
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.peer_client import PeerClient, PeerError, receive, send

STATE = {"outer_step": 4, "fragments": [{"theta": {"w": torch.arange(6.0)}}]}


@pytest.fixture
def donor(transports):
    def make(state=STATE, step=4):
        made = transports()
        made.serve(lambda: step, ScriptedState(state))
        return made

    return make


# ---- strangers, and donors that go ---------------------------------------------------------------


def test_a_stranger_that_relays_a_joiner_s_questions_learns_nothing(
    ends, has_quorum, donor, transports
):
    honest, joiner, answers = donor(), transports(), []

    def relay(asking):
        """Pass what a joiner asks on to an honest donor, over one connection, and keep it all."""
        until = time.monotonic() + 5
        with socket.create_connection(host_and_port(honest.metadata()), 5) as asked:
            send(asking, receive(asked, 1000, until), until)
            send(asked, receive(asking, 1000, until), until)
            answers.append(receive(asked, 1000, until))
            send(asking, answers[-1], until)

    address = ends.enter_context(strange_server(relay))
    # The stranger is of the highest step, so that joiners ask it first.
    has_quorum((4, honest.metadata()), (10**6, address))
    joiner.fetch()
    assert answers == [{"error": "rejected"}]
    assert joiner.downloaded is not None  # from the honest donor


@pytest.mark.parametrize("address", ["127.0.0.1:99999999", "[bad:1", "", "127.0.0.1\r\nX: y:80"])
def test_a_stranger_s_odd_address_does_not_end_a_joiner(has_quorum, donor, transports, address):
    honest, joiner = donor(), transports()
    has_quorum((4, honest.metadata()), (10**6, address))
    joiner.fetch()
    assert joiner.downloaded is not None


@pytest.mark.slow
def test_a_donor_that_fails_in_the_middle_is_followed_by_the_next(
    has_quorum, donor, transports, caplog
):
    def fail():  # it says what it has, and fails when it makes the copy
        raise HTTPException("out of memory")

    failing, honest, joiner = donor(fail, 5), donor(), transports(timeout=0.6)
    has_quorum((5, failing.metadata()), (4, honest.metadata()))
    joiner.fetch()
    assert joiner.downloaded is not None
    assert f"No global state from {failing.metadata()}: " in caplog.text
    has_quorum((5, failing.metadata()))
    message = "1 replica groups .* could not be fetched from any. The last error: "
    with pytest.raises(PeerError, match=message):
        transports(timeout=0.6).fetch()


@pytest.mark.parametrize("error", [KeyError, HTTPException], ids=["leaves", "dies"])
def test_a_donor_that_goes_while_it_is_asked_is_no_reason_to_fail(
    start_server, has_quorum, transports, error
):
    def go():
        if error is HTTPException:
            server.close()
        going.shutdown()
        raise error("it has gone")

    server, joiner = start_server(), transports()
    going = HealTransport(server, 5.0, "http://localhost:1", 0, "")
    going.serve(lambda: 4, ScriptedState(go))
    has_quorum((4, going.metadata()), (0, "127.0.0.1:1"))
    joiner.fetch()
    assert joiner.downloaded is None


# ---- beside the others' syncs --------------------------------------------------------------------


class Training(Group):
    """A donor in training that may be in a sync, and whose state may take long to come."""

    def __init__(self, transport):
        super().__init__(transport)
        self.delay_s, self.num_fetched = 0.0, 0
        self.commits = self.is_syncing = False
        transport.serve(lambda: self.step, self.state, lambda: self.is_syncing)

    def commit(self):
        super().commit()
        self.is_syncing = False


@pytest.fixture
def training(transports, has_quorum, monkeypatch):
    training = Training(transports())
    has_quorum((4, training.transport.metadata()))
    fetch = PeerClient.fetch

    def slow(*arguments, **more):
        time.sleep(training.delay_s)
        training.num_fetched += 1
        if training.commits:
            training.commit()
        return fetch(*arguments, **more)

    monkeypatch.setattr(PeerClient, "fetch", slow)
    monkeypatch.setattr(transport, "WAIT_FOR_COMMIT", 0.0)
    return training


def test_a_joiner_asks_for_the_newest_state_until_it_is_what_it_has_prepared(transports, training):
    joiner = transports()
    joiner.fetch()
    first = joiner.newest()
    assert first["outer_step"] == 4 and joiner.newest() is first
    training.commit()
    second = joiner.newest()
    assert second["outer_step"] == 5 and joiner.newest() is second
    training.enter_quorum()
    received = joiner.recv_checkpoint(0, training.transport.metadata(), 5, LIMIT)
    healed = received["user"]["diloco"]
    assert healed is second and healed[STATE_NAME] != first[STATE_NAME]


def test_a_joiner_whose_copy_was_dropped_for_another_joiner_asks_for_one_again(
    transports, training, monkeypatch
):
    joiner, other = transports(), transports()
    address, fetch = training.transport.metadata(), joiner._client.fetch
    memory = []

    def fetch_late(*arguments, into, **more):
        assert not any(earlier() for earlier in memory), "two states may not fit into memory"
        memory.append(weakref.ref(into))
        if training.step == 4:
            training.commit()
            other.ask(address, "copy")
        return fetch(*arguments, into=into, **more)

    monkeypatch.setattr(joiner._client, "fetch", fetch_late)
    joiner.fetch()
    assert joiner.downloaded.state["outer_step"] == 5
    assert joiner.newest() is joiner.downloaded.state


def test_a_state_whose_donor_has_left_is_still_one_to_prepare(transports, training, has_quorum):
    joiner = transports()
    joiner.fetch()
    first = joiner.newest()
    has_quorum()
    training.transport.shutdown()
    assert joiner.newest() is first
    late = transports()
    late.fetch()
    assert late.newest() is None


@pytest.mark.parametrize("donor", ["in a sync", "gone"])
def test_the_same_state_is_not_downloaded_twice(
    transports, training, has_quorum, donor, monkeypatch
):
    joiner, other = transports(), transports()
    joiner.fetch()
    first = joiner.newest()
    if donor == "in a sync":  # and it does not commit
        training.is_syncing = True
    else:
        other.serve(lambda: training.step, training.state)
        has_quorum((4, other.metadata()))
        training.transport.shutdown()
    assert joiner.newest() is first
    assert training.num_fetched == training.state.num_taken == 1
    if donor == "gone":  # from now on it asks the other one, and need not look for donors again
        monkeypatch.setattr(joiner, "fetch", None)
        assert joiner.newest() is first


@pytest.mark.slow
def test_a_joiner_does_not_keep_a_state_that_a_sync_is_about_to_change(
    transports, training, monkeypatch
):
    monkeypatch.setattr(transport, "WAIT_FOR_COMMIT", 1e6)  # times a download of a moment
    joiner = transports()
    joiner.fetch()
    training.is_syncing = True
    threading.Timer(1.0, training.commit).start()
    assert joiner.newest()["outer_step"] == 5


@pytest.mark.slow
def test_a_joiner_that_is_too_slow_for_the_others_rounds_leaves_the_rest_to_the_quorum(
    transports, training, monkeypatch
):
    monkeypatch.setattr(transport, "WAIT_FOR_COMMIT", 1e6)
    joiner = transports()
    joiner.fetch()
    training.commit()
    threading.Timer(0.5, training.commit).start()
    found = joiner.newest()
    assert found["outer_step"] == 6
    training.commit()  # while it prepares what it has fetched right after a commit
    assert joiner.newest() is found


@pytest.mark.slow
@pytest.mark.parametrize("commits", [True, False])
def test_a_slow_joiner_leaves_with_the_figures_if_it_would_hold_up_the_others(
    transports, training, commits
):
    training.delay_s, training.commits = 0.6, commits
    joiner = transports(timeout=2.0)
    if not commits:  # the others sync more slowly still
        joiner.fetch()
        assert joiner.downloaded
        return
    with pytest.raises(PeerError, match=r"takes \d\.\d s .* this group leaves. Use a faster link"):
        joiner.fetch()
