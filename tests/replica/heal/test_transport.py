"""How a state goes from a donor to a joiner. Run: pytest tests/replica/heal/test_transport.py

Real: the servers, on loopback, torch's unpickler. The donor's manager is what torchft would hand
over.
"""

import itertools
import logging
import pickle
import re
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from scripted_state import ScriptedState
from strange_servers import strange_server

from composer_replication.replica.heal import prefetch
from composer_replication.replica.heal.transport import HealTransport
from composer_replication.replica.lighthouse import LighthouseStatus, Member
from composer_replication.replica.peer_client import PeerClient, PeerError, send
from composer_replication.replica.peer_client import receive as receive_message

STATE = {"outer_step": 3, "fragments": [{"theta": {"w": torch.arange(4.0)}}]}
SENT = {"user": {"diloco": STATE, "clock": {"batch": 7}}, "torchft": {"step": 4}}
LIMIT = timedelta(seconds=10)


@pytest.fixture
def transports(start_server):
    def make(*tokens, timeout=10.0, name=""):
        return HealTransport(start_server(*tokens), timeout, name)

    return make


def receive(joiner, donor, step=4):
    return joiner.recv_checkpoint(0, donor.metadata(), step, LIMIT)


def test_a_joiner_gets_what_the_donor_offers_for_that_step_and_only_while_it_does(transports):
    donor, joiner = transports(timeout=0.2), transports()
    donor.serve(lambda: 4, ScriptedState(STATE))
    with pytest.raises(PeerError, match="has no 'offer 4'"):
        receive(joiner, donor)
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    got = receive(joiner, donor)
    assert torch.equal(got["user"]["diloco"]["fragments"][0]["theta"]["w"], torch.arange(4.0))
    assert (got["user"]["clock"], got["torchft"]) == ({"batch": 7}, {"step": 4})
    with pytest.raises(PeerError, match="has no 'offer"):
        receive(joiner, donor, step=5)
    donor.disallow_checkpoint()
    with pytest.raises(PeerError, match="has no 'offer"):
        receive(joiner, donor)


def test_what_is_offered_is_what_was_there_then(transports):
    donor, joiner = transports(), transports()
    inner = torch.zeros(3)
    sent = SENT | {"user": {"diloco": STATE, "optimizer": inner}}
    donor.send_checkpoint([1], 4, sent, LIMIT)
    inner += 1  # with a delay the group trains on
    received = receive(joiner, donor)["user"]["optimizer"]
    assert received.sum() == 0
    assert received.untyped_storage().nbytes() == received.nbytes  # it may be pickled


class Marker:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def rogue(tmp_path):
    """A server that answers every request with a pickle that runs code."""
    marker = tmp_path / "executed"

    def answer(connection):
        soon = time.monotonic() + 5
        send(connection, "challenge", soon)
        receive_message(connection, 10_000, soon)
        body = pickle.dumps({"user": Marker(marker), "torchft": Marker(marker)})
        connection.sendall(len(body).to_bytes(4, "little") + body)

    with strange_server(answer) as address:
        yield address, marker


def test_a_stranger_s_pickle_is_refused_before_it_is_looked_at(transports, rogue):
    address, marker = rogue
    with pytest.raises(PeerError, match="UnicodeDecodeError"):
        transports().recv_checkpoint(0, address, 4, LIMIT)
    assert not marker.exists()


def test_even_a_peer_s_pickle_is_not_run(transports, tmp_path):
    donor, joiner = transports(), transports()
    marker = tmp_path / "executed"
    sent = {"user": {"diloco": STATE, "more": Marker(marker)}, "torchft": {}}
    donor.send_checkpoint([1], 4, sent, LIMIT)
    with pytest.raises(PeerError, match="a peer's state is rejected, it is more than tensors"):
        receive(joiner, donor)
    assert not marker.exists()


def test_what_travels_is_the_state_and_not_five_models(transports):
    theta = {"w": torch.zeros(100_000)}
    momentum = {"state": {0: {"momentum_buffer": torch.zeros(100_000)}}}
    donor = transports()
    state = {"outer_step": 1, "fragments": [{"theta": theta, "optimizer": momentum}]}
    donor.send_checkpoint([1], 1, {"user": {"diloco": state}, "torchft": {}}, LIMIT)
    offer = transports().ask(donor.metadata(), "offer", "1", limit_s=10)
    assert 800_000 < offer.state.num_bytes < 810_000  # 8 bytes a parameter


def test_a_token_can_be_replaced_while_groups_heal_from_each_other(transports):
    # "old", then "old,new" in every process, then "new,old", then "new": neighbours understand
    # each other, in both directions; the first and the last do not.
    stages = [["old"], ["old", "new"], ["new", "old"], ["new"]]
    made = [transports(*tokens) for tokens in stages]
    for transport in made:
        transport.send_checkpoint([1], 4, SENT, LIMIT)
    for one, other in itertools.pairwise(made):
        assert receive(one, other)["torchft"] == receive(other, one)["torchft"]
    with pytest.raises(PeerError, match="does not accept this group's token"):
        receive(made[0], made[-1])


def test_a_heal_is_in_the_log_of_both_sides(transports, caplog):
    caplog.set_level(logging.INFO, "composer_replication.replica")
    donor = transports()
    joiner = transports(name="berlin")
    donor.send_checkpoint([1], 4, SENT, LIMIT)
    receive(joiner, donor)
    deadline = time.monotonic() + 5  # the donor writes when it has sent the last byte
    while len(caplog.records) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    given = re.findall(r"Gave a part .* to group berlin at 127.0.0.1: .* sha256 (\w+)", caplog.text)
    assert len(given) == 2  # the state, and the rest
    [taken] = re.findall(rf"manager step 4 from {donor.metadata()}: .* sha256 (\w+)", caplog.text)
    assert taken in given


# ---- ahead of the quorum -----------------------------------------------------------------------


@pytest.fixture
def in_training(transports, monkeypatch):
    """A donor in training; its manager's step, and how long a state takes to arrive."""
    donor = transports()
    now = {"step": 4, "delay_s": 0.0, "commits": False, "is_syncing": False}
    now["state"] = ScriptedState(lambda: STATE | {"outer_step": now["step"]})
    donor.serve(lambda: now["step"], now["state"], lambda: now["is_syncing"])
    status = LighthouseStatus((Member("0:uuid", 4, "http://manager"),), "")
    monkeypatch.setattr(prefetch, "read_status", lambda *_: status)
    monkeypatch.setattr(prefetch, "_donors", lambda *_: iter([donor.metadata()]))
    fetch = PeerClient.fetch

    def slow(*arguments, **more):
        time.sleep(now["delay_s"])
        now["step"] += now["commits"]
        now["state"].version += now["commits"]
        return fetch(*arguments, **more)

    monkeypatch.setattr(PeerClient, "fetch", slow)
    monkeypatch.setattr(prefetch, "WAIT_FOR_COMMIT", 0.0)
    return donor, now


def fetch_ahead(joiner, timeout=10.0):
    ahead = prefetch.Prefetch(
        joiner,
        lighthouse_addr="http://localhost:1",
        rank=0,
        timeout=timeout,
    )
    ahead.fetch()
    return ahead


def test_a_joiner_asks_for_the_newest_state_until_it_is_what_it_has_prepared(
    transports, in_training
):
    donor, now = in_training
    joiner = transports()
    ahead = fetch_ahead(joiner)
    first = ahead.newest()
    assert first["outer_step"] == 4 and ahead.newest() is first
    now["step"], now["state"].version = 5, now["state"].version + 1
    second = ahead.newest()
    assert second["outer_step"] == 5 and ahead.newest() is second
    sent = SENT | {"user": {"diloco": STATE | {"outer_step": 5}}}
    donor.send_checkpoint([1], 5, sent, LIMIT)
    assert receive(joiner, donor, step=5)["user"]["diloco"] is second


def test_a_state_whose_donor_has_left_is_still_one_to_prepare(transports, in_training, monkeypatch):
    donor, _ = in_training
    joiner = transports()
    ahead = fetch_ahead(joiner)
    first = ahead.newest()
    monkeypatch.setattr(prefetch, "_donors", lambda *_: iter([]))
    donor.shutdown()
    assert ahead.newest() is first


def test_there_is_nothing_to_prepare_if_there_was_no_donor(transports, in_training, monkeypatch):
    monkeypatch.setattr(prefetch, "_donors", lambda *_: iter([]))
    assert fetch_ahead(transports()).newest() is None


@pytest.mark.slow
def test_a_joiner_does_not_keep_a_state_that_a_sync_is_about_to_change(
    transports, in_training, monkeypatch
):
    _, now = in_training
    monkeypatch.setattr(prefetch, "WAIT_FOR_COMMIT", 4.0)
    ahead = fetch_ahead(transports())
    ahead._began = time.monotonic() - 5.0
    now["is_syncing"] = True

    def commit():
        now["state"].version += 1
        now["step"], now["is_syncing"] = 5, False

    threading.Timer(1.0, commit).start()
    assert ahead.newest()["outer_step"] == 5


@pytest.mark.slow
def test_a_joiner_that_is_too_slow_for_the_others_rounds_leaves_the_rest_to_the_quorum(
    transports, in_training, monkeypatch
):
    _, now = in_training
    monkeypatch.setattr(prefetch, "WAIT_FOR_COMMIT", 4.0)
    ahead = fetch_ahead(transports())
    ahead._began = time.monotonic() - 5.0

    def commit():
        now["state"].version += 1
        now["step"] += 1

    commit()
    threading.Timer(0.5, commit).start()
    found = ahead.newest()
    assert found["outer_step"] == 6
    commit()  # while it prepares what it has fetched right after a commit
    assert ahead.newest() is found


@pytest.mark.slow
@pytest.mark.parametrize("commits", [True, False])
def test_a_slow_joiner_leaves_with_the_figures_if_it_would_hold_up_the_others(
    transports, in_training, commits
):
    _, now = in_training
    now |= {"delay_s": 0.6, "commits": commits}
    joiner = transports()
    if not commits:  # the others sync more slowly still
        fetch_ahead(joiner, timeout=2.0)
        assert joiner.downloads
        return
    with pytest.raises(PeerError, match=r"takes \d\.\d s .* this group leaves. Use a faster link"):
        fetch_ahead(joiner, timeout=2.0)


@pytest.mark.slow
def test_a_donor_that_dies_or_lies_does_not_end_the_joiner_while_there_is_another(
    transports, in_training, monkeypatch, rogue, caplog
):
    donor, _ = in_training
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{closed.getsockname()[1]}"
        donors = [dead, rogue[0], "[bad:1", "127.0.0.1:99999999", donor.metadata()]
        monkeypatch.setattr(prefetch, "_donors", lambda *_: iter(donors))
        joiner = transports()
        fetch_ahead(joiner)
        assert joiner.downloads
        for each in donors[:-1]:
            assert f"No global state from {each}: " in caplog.text
        monkeypatch.setattr(prefetch, "_donors", lambda *_: iter(donors[:-1]))
        # Those that are not there are no donors; the other one answers, and lies.
        with pytest.raises(
            PeerError, match="1 replica groups .* could not be fetched from any. The last error: "
        ):
            fetch_ahead(transports())
