"""Buffers that are averaged with the parameters. Run: pytest tests/diloco/test_buffers.py"""

import math

import pytest
import torch
from common import Constant, batch, plain_sgd, take_step
from torch import nn

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.fragments import split_all
from composer_replication.diloco.global_state import digest_of
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault


class WithBuffers(Constant):
    """A scalar to train, and a buffer of every kind."""

    def __init__(self, mean=0.0):
        super().__init__()
        self.register_buffer("mean", torch.tensor([mean]))
        self.register_buffer("low", torch.tensor([mean], dtype=torch.bfloat16))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3]))
        self.register_buffer("causal", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(2**60))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.tensor([mean]), persistent=False)


def run(sim, steps=2, final=False, **settings):
    """Two steps a round; in each the replica's buffers move by its own amount."""
    model = WithBuffers()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    by = float(sim.replica_id + 1)
    with DiLoCo(sim.manager, model, inner, plain_sgd(), 2, **settings) as diloco:
        for _ in range(steps):
            model.mean += by
            model.low = model.low + by  # a new tensor
            model.cache += by
            model.count += sim.replica_id + 1
            model.mask ^= sim.replica_id == 1
            take_step(inner, -1.0)
        if final:
            diloco.final_sync()
        globals_ = {name: t.tolist() for name, t in diloco.global_parameters().items()}
    local = {**model.state_dict(), "cache": model.cache}
    return {name: t.tolist() for name, t in local.items()}, globals_


def test_floating_buffers_become_the_mean_and_all_others_are_the_first_group_s():
    (one, globals_), (other, theirs) = simulate(run, num_replicas=2)
    assert one["mean"] == other["mean"] == [3.0]  # (2 + 4) / 2
    assert one["low"] == other["low"] == [3.0]
    assert one["count"] == other["count"] == 2**60 + 2
    assert one["mask"] == other["mask"] == [True, False]
    assert one["causal"] == other["causal"] == [0.0, -math.inf]
    assert (one["cache"], other["cache"]) == ([2.0], [4.0])
    assert globals_ == theirs
    assert globals_ == {name: value for name, value in one.items() if name != "cache"}


def test_weights_count_for_buffers_too():
    def replica(sim):
        model = WithBuffers(mean=10.0 * sim.replica_id)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1, weight_by="samples") as diloco:
            model.mean.fill_(10.0 * sim.replica_id)  # the cold start has levelled it
            diloco.count_samples((1, 3)[sim.replica_id])
            take_step(inner, -1.0)
        return model.mean.item()

    assert simulate(replica, num_replicas=2) == [7.5, 7.5]


def test_nobody_touches_them_with_none():
    (one, globals_), (other, _) = simulate(
        lambda sim: run(sim, sync_buffers="none"), num_replicas=2
    )
    assert (one["mean"], other["mean"]) == ([2.0], [4.0])
    assert (one["count"], other["count"]) == (2**60 + 2, 2**60 + 4)
    assert set(globals_) == {"weight"}


def test_a_buffer_that_is_a_constant_stays_what_it_is_to_the_bit():
    # (x + x + x) / 3 is not x for every float; so the mean is taken of differences.
    for buffers, _ in simulate(lambda sim: run(sim, 8), num_replicas=3):
        assert buffers["constant"] == torch.tensor([0.1, 1 / 3]).tolist()


def test_with_a_delay_what_has_moved_since_is_mixed_in_like_parameters():
    # Packed after one of two steps: buffers 1 and 2, mean 1.5; then 0.5 * (2 or 4) + 0.5 * 1.5.
    settings = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    one, other = simulate(lambda sim: run(sim, **settings), num_replicas=2)
    assert (one[0]["mean"], other[0]["mean"]) == ([1.75], [2.75])
    assert one[1]["mean"] == other[1]["mean"] == [1.5]
    # What has no mean is as it was when the first group sent it.
    assert {each[n]["count"] for each in (one, other) for n in (0, 1)} == {2**60 + 1}


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
def test_batch_norm_ends_alike_in_all_groups(wire_format):
    def replica(sim):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"num_fragments": 2, "wire_format": wire_format}
        with DiLoCo(sim.manager, model, inner, sync_every=4, **settings) as diloco:
            for step in range(6 + sim.replica_id):
                x, y = batch(sim.replica_id, step)
                inner.zero_grad()
                nn.functional.mse_loss(model(x + sim.replica_id), y).backward()
                inner.step()
            diloco.final_sync()
            digest = digest_of(model.state_dict())
            assert digest == diloco.global_digest()
        model.eval()
        return (
            model(batch(9, 9)[0]),
            model[1].running_mean,
            digest,
            int(model[1].num_batches_tracked),
        )

    (one, mean, *ends), (other, _, *others) = simulate(replica, num_replicas=2)
    assert torch.equal(one, other) and ends == others
    assert mean.abs().sum() > 0.01 and ends[-1] >= 6


@pytest.mark.parametrize("late", [0, 1])  # the first group of the quorum, or another one
def test_a_joiner_has_the_global_buffers(late):
    def replica(sim):
        local, globals_ = run(sim, 4 if sim.replica_id == late else 8, final=True)
        assert {name: local[name] for name in globals_} == globals_
        return globals_

    fault = Fault("late", replica_id=late, step=3)
    first, second = simulate(replica, num_replicas=2, faults=[fault])
    assert first == second
    assert first["count"] > 2**60 + 4


def test_buffers_of_modules_given_one_by_one_go_with_theirs():
    split = split_all([WithBuffers(), nn.BatchNorm1d(2)], DiLoCoSettings(num_fragments=2))
    names = [list(buffers) for _, buffers in split]
    assert names[0] == [
        f"0.{name}" for name in ("mean", "low", "constant", "causal", "count", "mask")
    ]
    assert names[1] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
