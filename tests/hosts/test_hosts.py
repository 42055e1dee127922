"""What every host of DiLoCo is asked. Run: pytest tests/hosts

A plain loop and Composer run as threads over the simulation's network. Hugging Face's Trainer runs
as processes over a real lighthouse and gloo, since transformers keeps state for the whole process.
"""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from common import Buffered, TinyMLP, batch
from torch import nn

from hosts.host import Job

NEEDS = {"plain": "torch", "composer_host": "composer", "hf_host": "transformers"}


@pytest.fixture(
    params=["plain", pytest.param("composer_host", marks=pytest.mark.slow), "hf_host"],
    scope="module",
)
def host(request):
    pytest.importorskip(NEEDS[request.param], reason=f"{NEEDS[request.param]} is not installed")
    return importlib.import_module(f"hosts.{request.param}")


STREAMING = {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1}


# ---- joining, the sign, counting ------------------------------------------------------------


def test_groups_with_different_weights_start_from_the_first_ones_and_end_equal(host):
    first, second = host.train(Job())
    assert first.digest == second.digest
    assert first.outer_steps == second.outer_steps == 2
    for name, tensor in first.weights.items():
        torch.testing.assert_close(second.weights[name], tensor, rtol=0, atol=0)


class Line(nn.Module):
    """w = (2, 1), b = 1."""

    def __init__(self, replica_id):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor([[2.0, 1.0]]))
            self.linear.bias.fill_(1.0)

    def forward(self, x):
        return self.linear(x)


def slow_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lines(replica_id, count):
    # Two samples a batch, four times: the hosts' batches have eight, and a mean is the same.
    if replica_id == 0:
        x, y = [[0.0, 1.0], [1.0, 0.0]], [[1.0], [2.0]]
    else:
        x, y = [[1.0, 0.0], [0.0, 1.0]], [[2.0], [3.0]]
    return [(torch.tensor(x).repeat(4, 1), torch.tensor(y).repeat(4, 1))] * count


def test_two_groups_follow_the_trace_that_maxtext_computed_by_hand(host):
    # The gradient of mean((x w + b - y)^2) is the mean of 2 e x over the samples, of errors e.
    # Group 0: samples (0, 1) -> 1 and (1, 0) -> 2 have errors 1 and 1, which each step multiplies
    # by 1 - 0.1 (1 + 2) = 0.7: w and b move by 0.1 (1, 1, 2) (1 + 0.7 + 0.49) = 0.219 (1, 1, 2).
    # Group 1: (1, 0) -> 2 and (0, 1) -> 3 have errors 1 and -1, times 1 - 0.1 = 0.9 a step: they
    # move by 0.1 (1, -1, 0) (1 + 0.9 + 0.81) = 0.271 (1, -1, 0).
    # Mean pseudo-gradient: (0.245, -0.026, 0.219). The first Nesterov step is lr (1 + 0.9) of it:
    # w = (2 - 1.9 * 0.245, 1 + 1.9 * 0.026), b = 1 - 1.9 * 0.219.
    settings = {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.9}
    job = Job(steps=3, settings=settings, model=Line, optimizer=slow_sgd, batches=lines)
    for outcome in host.train(job):
        weight, bias = outcome.weights["linear.weight"][0], outcome.weights["linear.bias"][0]
        assert weight.tolist() == pytest.approx([1.5345, 1.0494], abs=5e-5)
        assert bias.item() == pytest.approx(0.5839, abs=5e-5)
        assert outcome.outer_steps == 1


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_is_counted_once_however_many_batches_it_accumulates(host, accumulate):
    for outcome in host.train(Job(accumulate=accumulate)):
        assert (outcome.inner_steps, outcome.outer_steps) == (8, 2)


def test_samples_are_counted_over_the_batches_of_a_step(host):
    settings = {"weight_by": "samples"}
    for outcome in host.train(Job(settings=settings, accumulate=2)):
        assert outcome.contributions == [4 * 2 * 8] * 2


# ---- global weights -------------------------------------------------------------------------


def test_evaluation_sees_global_weights_equal_in_all_groups(host):
    first, second = host.train(Job(evaluate_every=2))
    assert first.evaluations == second.evaluations
    assert first.evaluations.keys() == {2, 4, 6, 8}
    # Between two syncs the global weights stay as they are.
    assert first.evaluations[4] == first.evaluations[6] != first.evaluations[8]


def test_an_evaluation_changes_nothing_in_training(host):
    assert host.train(Job(evaluate_every=1))[0].digest == host.train(Job())[0].digest


def test_a_checkpoint_has_the_global_weights(host, tmp_path):
    job = Job(steps=10, save_every=5, folder=tmp_path)
    host.train(job)
    first, second = (host.saved_weights(job, replica_id, 5) for replica_id in range(2))
    assert first.keys() == TinyMLP().state_dict().keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0)


# ---- resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, STREAMING], ids=["vanilla", "streaming"])
# After another sync, so that both groups have saved, and before the next checkpoint.
@pytest.mark.parametrize(("step", "fails_at"), [(3, 5), (4, 8), (5, 9)])
def test_a_run_that_is_continued_has_the_same_bits(host, settings, step, fails_at, tmp_path):
    whole = host.train(Job(steps=9, settings=settings, accumulate=2))
    part = {"save_every": step, "folder": tmp_path, "settings": settings, "accumulate": 2}
    stopped = Job(steps=9, fails_at={0: fails_at, 1: fails_at}, **part)
    with pytest.raises(Exception, match="fails"):
        host.train(stopped)
    continued = host.train(dataclasses.replace(stopped, fails_at={}, resumes=True))
    assert [each.digest for each in continued] == [each.digest for each in whole]
    assert [each.inner_steps for each in continued] == [9, 9]


# ---- ends -----------------------------------------------------------------------------------


def test_what_was_trained_since_the_last_sync_is_in_the_final_one(host):
    whole, (first, second) = host.train(Job(steps=4)), host.train(Job(steps=6))
    assert first.digest == second.digest != whole[0].digest
    assert first.outer_steps == 2


def test_all_groups_may_end_early(host):
    first, second = host.train(Job(steps=12, stops_at=6))
    assert first.digest == second.digest
    assert (first.inner_steps, first.outer_steps) == (6, 2)


# ---- models ---------------------------------------------------------------------------------


class Frozen(TinyMLP):
    def __init__(self, replica_id):
        super().__init__(0)
        self.layers[0].requires_grad_(False)


class Tied(TinyMLP):
    def __init__(self, replica_id):
        super().__init__(replica_id, width=8)
        self.layers[2].weight = self.layers[0].weight


class LowRank(nn.Module):
    """A frozen layer and a trained low-rank addition to it, as LoRA has them."""

    def __init__(self, replica_id):
        super().__init__()
        self.base = TinyMLP(0).requires_grad_(False)
        generator = torch.Generator().manual_seed(replica_id)
        self.down = nn.Parameter(0.1 * torch.randn(2, 8, generator=generator))
        self.up = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def sgd_of_trained(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


@pytest.mark.parametrize("model", [Frozen, Tied, LowRank, Buffered])
def test_models_of_many_kinds_end_equal(host, model):
    first, second = host.train(Job(model=model, optimizer=sgd_of_trained))
    assert first.digest == second.digest
    for name, tensor in first.weights.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(second.weights[name], tensor, rtol=0, atol=0)


# ---- errors ---------------------------------------------------------------------------------


def same_batches(replica_id, count):
    return [batch(0, step) for step in range(count)]


def test_only_groups_on_the_same_samples_are_warned_of(host):
    assert any(each.warns_of_samples for each in host.train(Job(batches=same_batches)))
    assert not any(each.warns_of_samples for each in host.train(Job()))


def test_an_argument_out_of_range_is_an_error_of_one_line_before_any_peer_waits(host):
    settings = {"sync_every": 5, "num_fragments": 2}
    with pytest.raises(Exception, match="sync_every=5 is not divisible by num_fragments=2: use 4"):
        host.train(Job(settings=settings))


def test_a_failed_step_ends_the_job_with_its_own_error(host):
    with pytest.raises(Exception, match="step 3 of group . fails"):
        host.train(Job(fails_at={0: 3, 1: 3}))
