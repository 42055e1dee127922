"""P11: floating buffers are averaged and part of the digest, all others are the first group's."""

import math
from functools import partial

import pytest
import torch
from common import Constant, batch, plain_sgd
from promises.groups import STREAMING, run
from torch import nn

from composer_replication.diloco.fragments import synced_tensors
from composer_replication.diloco.global_state import digest_of
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault


class WithBuffers(Constant):
    """A scalar to train, and a buffer of every kind."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.0]))
        self.register_buffer("low", torch.tensor([0.0], dtype=torch.bfloat16))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3]))
        self.register_buffer("causal", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(2**60))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.tensor([0.0]), persistent=False)


def train(group, steps=2, final=False):
    """In each step the group's buffers move by its own amount: the local and the global ones."""
    model, by = group.model, group.id + 1
    for _ in range(steps):
        model.mean += by
        model.low = model.low + by  # a new tensor
        model.cache += by
        model.count += by
        model.mask ^= group.id == 1
        group.step(-1.0)
    if final:
        group.end()
    local = {**model.state_dict(), "cache": model.cache}
    global_ = group.diloco.global_parameters()
    return [{name: t.tolist() for name, t in tensors.items()} for tensors in (local, global_)]


def trained(k, *faults, replica=train, **settings):
    settings = {"model": WithBuffers, "outer": plain_sgd(), "sync_every": 2} | settings
    return run(k, replica, *faults, **settings)


def test_floating_buffers_become_the_mean_and_all_others_are_the_first_group_s():
    (one, globals_), (other, theirs) = trained(2)
    assert one["mean"] == other["mean"] == [3.0]  # (2 + 4) / 2
    assert one["low"] == other["low"] == [3.0]
    assert one["count"] == other["count"] == 2**60 + 2
    assert one["mask"] == other["mask"] == [True, False]
    assert one["causal"] == other["causal"] == [0.0, -math.inf]
    assert (one["cache"], other["cache"]) == ([2.0], [4.0])
    assert globals_ == theirs
    assert globals_ == {name: value for name, value in one.items() if name != "cache"}


def test_weights_count_for_buffers_too():
    def replica(group):
        group.model.mean.fill_(10.0 * group.id)
        group.diloco.count_samples((1, 3)[group.id])
        group.step(-1.0)
        return group.model.mean.item()

    assert trained(2, replica=replica, sync_every=1, weight_by="samples") == [7.5, 7.5]


def test_nobody_touches_them_with_none():
    (one, globals_), (other, _) = trained(2, sync_buffers="none")
    assert (one["mean"], other["mean"]) == ([2.0], [4.0])
    assert (one["count"], other["count"]) == (2**60 + 2, 2**60 + 4)
    assert set(globals_) == {"weight"}


def test_a_buffer_that_is_a_constant_stays_what_it_is_to_the_bit():
    # (x + x + x) / 3 is not x for every float; so the mean is taken of differences.
    for buffers, _ in trained(3, replica=partial(train, steps=8)):
        assert buffers["constant"] == torch.tensor([0.1, 1 / 3]).tolist()


def test_with_a_delay_what_has_moved_since_is_mixed_in_like_parameters():
    # Packed after one of two steps: buffers 1 and 2, mean 1.5; then 0.5 * (2 or 4) + 0.5 * 1.5.
    one, other = trained(2, **STREAMING)
    assert (one[0]["mean"], other[0]["mean"]) == ([1.75], [2.75])
    assert one[1]["mean"] == other[1]["mean"] == [1.5]
    # What has no mean is as it was when the first group sent it.
    assert {each[n]["count"] for each in (one, other) for n in (0, 1)} == {2**60 + 1}


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
def test_batch_norm_ends_alike_in_all_groups(wire_format):
    def model():
        made = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        for parameter in made.parameters():
            nn.init.constant_(parameter, 0.1)
        return made

    def replica(group):
        model = group.model
        for step in range(6 + group.id):
            x, y = batch(group.id, step)
            group.inner.zero_grad()
            nn.functional.mse_loss(model(x + group.id), y).backward()
            group.inner.step()
        group.end()
        digest = digest_of(model.state_dict())
        assert digest == group.diloco.global_digest()
        assert model[1].running_mean.abs().sum() > 0.01
        return digest, int(model[1].num_batches_tracked)

    settings = {"num_fragments": 2, "wire_format": wire_format, "sync_every": 4}
    one, other = trained(2, replica=replica, model=model, **settings)
    assert one == other and one[1] >= 6


@pytest.mark.parametrize("late", [0, 1])  # the first group of the quorum, or another one
def test_a_joiner_has_the_global_buffers(late):
    def replica(group):
        local, globals_ = train(group, 4 if group.id == late else 8, final=True)
        assert {name: local[name] for name in globals_} == globals_
        return globals_

    first, second = trained(2, Fault("late", replica_id=late, step=3), replica=replica)
    assert first == second
    assert first["count"] > 2**60 + 4


def test_buffers_of_modules_given_one_by_one_go_with_theirs():
    split = synced_tensors([WithBuffers(), nn.BatchNorm1d(2)], DiLoCoSettings(num_fragments=2))
    buffers = ("mean", "low", "constant", "causal", "count", "mask")
    assert [*split[0]] == [f"0.{name}" for name in ("weight", *buffers)]
    assert [*split[1]] == [
        f"1.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
