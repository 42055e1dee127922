"""A replica group that trains alone. Run: pytest tests/replica/test_single_group.py

Who is such a group. How it trains, against one of a lighthouse, is in
tests/integration/test_alone.py, and against others in the promises.
"""

import logging
import re
import threading

import psutil
import pytest
import torch
from common import TinyMLP, batch, mse

from composer_replication import DiLoCo, simulate
from composer_replication.replica.factory import make_manager
from composer_replication.replica.heal.state_bytes import digest_of_bytes, dump
from composer_replication.replica.single_group import SingleGroupManager

pytestmark = pytest.mark.usefixtures("no_network")


def test_one_replica_and_no_lighthouse_is_all_it_takes_and_nothing_is_opened(monkeypatch):
    process = psutil.Process()

    def opened():
        return {*process.net_connections("all"), *process.children(), *threading.enumerate()}

    before = opened()
    assert isinstance(make_manager(num_replicas=1), SingleGroupManager)
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "1")
    assert isinstance(make_manager(), SingleGroupManager)
    assert opened() <= before


@pytest.mark.parametrize("num_replicas", [None, 2])
def test_otherwise_a_lighthouse_has_to_be_named_and_the_error_has_this_way_too(num_replicas):
    with pytest.raises(ValueError, match="no lighthouse is named. Start the groups") as error:
        make_manager(replica_id=0, num_replicas=num_replicas)
    assert "set num_replicas=1" in str(error.value)
    with pytest.raises(ValueError, match="has no name. Start the groups with `composer") as error:
        make_manager(num_replicas=num_replicas)
    assert "set num_replicas=1" in str(error.value)


def test_with_a_lighthouse_one_replica_is_a_group_that_others_may_join(monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "head")
    with pytest.raises(ValueError, match="this replica group has no name"):
        make_manager(num_replicas=1)
    with pytest.raises(ValueError, match="lighthouse_addr='head'"):
        make_manager(num_replicas=1, replica_id=0)


def test_ranks_that_could_not_vote_together_are_refused():
    message = "world_size=2, and torch.distributed has 1 ranks: a group that trains alone consists"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_manager(num_replicas=1, rank=0, world_size=2)


def test_what_only_a_network_needs_is_named_as_unused(caplog):
    caplog.set_level(logging.INFO, logger="composer_replication")
    make_manager(num_replicas=1, hostname="127.0.0.1", token="secret")
    assert caplog.messages == [
        "Training alone, without a network: num_replicas is 1, and no lighthouse is named. "
        "Not used: hostname, token"
    ]


@pytest.mark.parametrize("wire_format", ["float32", "bfloat16", "int8", "fp4"])
def test_it_trains_as_the_one_group_of_a_simulation_bit_for_bit(wire_format):
    def train(manager):
        model = TinyMLP(0)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with DiLoCo(manager, model, inner, sync_every=2, wire_format=wire_format) as diloco:
            for number in range(8):
                inner.zero_grad()
                mse(model, *batch(0, number)).backward()
                inner.step()
            state = diloco.state_dict()
            diloco.final_sync()
        return diloco.global_digest(), digest_of_bytes(dump(state))

    [simulated] = simulate(lambda sim: train(sim.manager), num_replicas=1)
    assert train(make_manager(num_replicas=1)) == simulated


def test_before_a_quorum_it_has_no_participants_and_no_vote():
    manager = SingleGroupManager()
    assert (manager.num_participants(), manager.participating_rank()) == (0, None)
    with pytest.raises(AssertionError, match="a vote before start_quorum"):
        manager.should_commit()
    with pytest.raises(ValueError, match="should_quantize=True: SingleGroupManager cannot"):
        manager.allreduce(torch.ones(1), should_quantize=True)


def test_how_many_groups_a_loop_waits_for_is_what_make_manager_was_told(monkeypatch):
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    model = TinyMLP(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(make_manager(num_replicas=1), model, inner, sync_every=2):  # it waits for nobody
        pass
