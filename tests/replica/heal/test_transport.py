"""How a state goes from a donor to a joiner. Run: pytest tests/replica/heal/test_transport.py

Real: the servers, on loopback, torch's unpickler. The donor's manager is what torchft would hand
over.
"""

import itertools
import logging
import pickle
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from scripted_state import ScriptedState
from strange_servers import strange_server
from waiting import wait_until

from composer_replication.replica.peer_client import PeerError, send
from composer_replication.replica.peer_client import receive as receive_message

STATE = {"outer_step": 3, "fragments": [{"theta": {"w": torch.arange(4.0)}}]}
SENT = {"user": {"diloco": STATE, "clock": {"batch": 7}}, "torchft": {"step": 4}}
LIMIT = timedelta(seconds=10)


def receive(joiner, donor, step=4):
    return joiner.recv_checkpoint(0, donor.metadata(), step, LIMIT)


@pytest.mark.slow
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


def test_a_stranger_s_pickle_is_refused_before_it_is_looked_at(transports, tmp_path):
    marker = tmp_path / "executed"

    def answer(connection):
        soon = time.monotonic() + 5
        send(connection, "challenge", soon)
        receive_message(connection, 10_000, soon)
        body = pickle.dumps({"user": Marker(marker), "torchft": Marker(marker)})
        connection.sendall(len(body).to_bytes(4, "little") + body)

    with strange_server(answer) as address:
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
    wait_until(lambda: len(caplog.records) >= 3, 5)  # the donor's when the last byte is sent
    given = re.findall(r"Gave a part .* to group berlin at 127.0.0.1: .* sha256 (\w+)", caplog.text)
    assert len(given) == 2  # the state, and the rest
    [taken] = re.findall(rf"manager step 4 from {donor.metadata()}: .* sha256 (\w+)", caplog.text)
    assert taken in given
