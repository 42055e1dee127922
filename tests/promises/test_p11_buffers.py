"""P11: floating buffers are averaged and part of the digest, all others are the first group's."""

import math
from functools import partial

import pytest
import torch
from common import Constant, batch, plain_sgd
from harness.groups import STREAMING, Group, run
from torch import nn

from composer_replication import simulate
from composer_replication.diloco.fragments import synced_tensors
from composer_replication.diloco.global_state import digest_of_tensors
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault

EXACT = 123456789.123456789
"""Of which float32 has only the first eight digits."""


class WithBuffers(Constant):
    """A scalar to train, and a buffer of every kind."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.0]))
        self.register_buffer("low", torch.tensor([0.0], dtype=torch.bfloat16))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3]))
        self.register_buffer("causal", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(2**60))
        self.register_buffer("exact", torch.tensor([EXACT, 2.0**30], dtype=torch.float64))
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
        model.exact[1] += by
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
    # The mean is of float32 numbers, which have no 2**30 + 2.
    assert one["exact"] == other["exact"] == [EXACT, 2.0**30 + 2]
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
        digest = digest_of_tensors(model.state_dict())
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


class Observed(Constant):
    """A model with the least value that it has seen, which begins at inf."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor([math.inf]))
        self.register_buffer("low", torch.tensor([-math.inf, 0.0], dtype=torch.bfloat16))


def observe(group, steps, seen=(2.0, 1.0)):
    for _ in range(steps):
        group.model.least.copy_(group.model.least.clamp(max=seen[group.id]))
        group.step(-1.0)
    return group.model.least.item()


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
def test_a_buffer_that_begins_at_inf_is_the_first_group_s_and_then_the_mean(wire_format):
    def replica(group):
        after = [observe(group, 2)]
        group.model.least.fill_((1.0, 3.0)[group.id])
        after.append(observe(group, 2, seen=(9.0, 9.0)))
        return after, group.model.low.tolist(), group.of_reports("steps_lost")

    expected = ([2.0, 2.0], [-math.inf, 0.0], [0, 0])
    assert trained(2, replica=replica, model=Observed, wire_format=wire_format) == [expected] * 2


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("settings", [{}, STREAMING], ids=["", "with a delay"])
def test_what_is_not_finite_in_one_group_s_buffer_reaches_nobody_and_costs_no_step(odd, settings):
    def replica(group, value):
        for _ in range(4):
            group.model.mean.fill_(value if group.id == 0 else 3.0)
            group.step(-1.0)
        group.end()
        assert group.of_reports("steps_lost", "contribution")[:2] == [(0, 1.0)] * 2
        return group.model.mean.item(), group.theta[0]

    (mean, weight), other = trained(2, replica=partial(replica, value=odd), **settings)
    assert (mean, weight) == other
    assert 0.0 < mean < 3.0  # group 0 sends the global value: half of the way to 3 in each sync
    assert weight == trained(2, replica=partial(replica, value=3.0), **settings)[0][1]


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_buffer_is_treated_alike_whatever_it_is_when_a_group_resumes(at):
    # In the checkpoint it is finite, in the groups that have trained on it began at inf.
    def whole(group):
        saved = {}
        for done in range(1, 7):
            observe(group, 1)
            saved[done] = group.save()
        return (group.theta, group.model.least.item()), saved

    ends, saved = zip(*trained(2, replica=whole, model=Observed), strict=True)
    lives = [0, 0]

    def all_resume(sim):
        return go_on(sim, saved[sim.replica_id][at], 6 - at)

    def one_resumes(sim):
        lives[sim.replica_id] += 1
        again = lives[sim.replica_id] > 1
        return go_on(sim, saved[1][at] if again else None, 8 if again else 12)

    def go_on(sim, checkpoint, steps):
        settings = {"outer": plain_sgd(), "sync_every": 2, "num_replicas": 2}
        with Group(sim, model=Observed, saved=checkpoint, **settings) as group:
            observe(group, steps)
            if steps > 6:
                group.end()
            return group.theta, group.model.least.item()

    assert simulate(all_resume, num_replicas=2) == [*ends]
    fault = Fault("restart", replica_id=1, step=4)
    first, second = simulate(one_resumes, num_replicas=2, faults=[fault])
    assert first == second


def test_buffers_of_modules_given_one_by_one_go_with_theirs():
    split = synced_tensors([WithBuffers(), nn.BatchNorm1d(2)], DiLoCoSettings(num_fragments=2))
    buffers = ("mean", "low", "constant", "causal", "count", "exact", "mask")
    assert [*split[0]] == [f"0.{name}" for name in ("weight", *buffers)]
    assert [*split[1]] == [
        f"1.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
