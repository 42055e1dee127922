"""What every host of DiLoCo is asked. Run: pytest tests/hosts

A plain loop and Composer run as threads over the simulation's network. Hugging Face's Trainer runs
as processes over a real lighthouse and gloo, since transformers keeps state for the whole process;
so do groups of several ranks. docs/choosing-a-host.md has those tests that a host does not pass.
"""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import replace

import pytest
import torch
from common import Buffered, TinyMLP, are_equal, batch
from torch import nn
from waiting import wait_until

from hosts.host import LACKS, Job

NEEDS = {
    "plain": "torch",
    "composer_host": "composer",
    "hf_host": "transformers",
    "lightning_host": "lightning",
    "accelerate_host": "accelerate",
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name == "composer_host")) for name in NEEDS
    ],
)
def host(request):
    if reason := LACKS.get((request.param, request.function.__name__)):
        pytest.skip(reason)
    pytest.importorskip(NEEDS[request.param], reason=f"{NEEDS[request.param]} is not installed")
    return importlib.import_module(f"hosts.{request.param}")


STREAMING = {"sync_every": 4, "num_fragments": 2, "fragment_sync_delay": 1}


# ---- joining, the sign, counting ------------------------------------------------------------


def test_groups_with_different_weights_start_from_the_first_ones_and_end_equal(host):
    first, second = host.train(Job())
    assert first.digest == second.digest
    assert first.outer_steps == second.outer_steps == 2
    assert are_equal(first.weights, second.weights)


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


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr)


def lines(replica_id, count):
    # Two samples a batch, four times: the hosts' batches have eight, and a mean is the same.
    if replica_id == 0:
        x, y = [[0.0, 1.0], [1.0, 0.0]], [[1.0], [2.0]]
    else:
        x, y = [[1.0, 0.0], [0.0, 1.0]], [[2.0], [3.0]]
    return [(torch.tensor(x).repeat(4, 1), torch.tensor(y).repeat(4, 1))] * count


def check_trace(host, **of_job):
    # The gradient of mean((x w + b - y)^2) is the mean of 2 e x over the samples, of errors e.
    # Group 0: samples (0, 1) -> 1 and (1, 0) -> 2 have errors 1 and 1, which each step multiplies
    # by 1 - 0.1 (1 + 2) = 0.7: w and b move by 0.1 (1, 1, 2) (1 + 0.7 + 0.49) = 0.219 (1, 1, 2).
    # Group 1: (1, 0) -> 2 and (0, 1) -> 3 have errors 1 and -1, times 1 - 0.1 = 0.9 a step: they
    # move by 0.1 (1, -1, 0) (1 + 0.9 + 0.81) = 0.271 (1, -1, 0).
    # Mean pseudo-gradient: (0.245, -0.026, 0.219). The first Nesterov step is lr (1 + 0.9) of it:
    # w = (2 - 1.9 * 0.245, 1 + 1.9 * 0.026), b = 1 - 1.9 * 0.219.
    settings = {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.9}
    of_job = {"steps": 3, "model": Line, "optimizer": sgd, "batches": lines} | of_job
    for outcome in host.train(Job(settings=settings, **of_job)):
        weight, bias = outcome.weights["linear.weight"][0], outcome.weights["linear.bias"][0]
        assert weight.tolist() == pytest.approx([1.5345, 1.0494], abs=5e-5)
        assert bias.item() == pytest.approx(0.5839, abs=5e-5)
        assert outcome.outer_steps == 1


def test_two_groups_follow_the_trace_that_maxtext_computed_by_hand(host):
    check_trace(host)


@pytest.mark.integration
def test_groups_of_two_ranks_under_DDP_follow_the_same_trace(host, tmp_path):
    check_trace(host, ranks=2, folder=tmp_path)


@pytest.mark.integration
def test_groups_whose_two_ranks_shard_the_model_with_FSDP2_train_as_unsharded_ones(host, tmp_path):
    # torch 2.7's gloo sums the ranks' gradients where FSDP2 asks for their mean.
    optimizer = functools.partial(sgd, lr=0.05 if torch.__version__ < (2, 8) else 0.1)
    check_trace(host, ranks=2, is_sharded=True, folder=tmp_path, optimizer=optimizer)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_is_counted_once_however_many_batches_it_accumulates(host, accumulate):
    for outcome in host.train(Job(accumulate=accumulate)):
        assert (outcome.inner_steps, outcome.outer_steps) == (8, 2)


class Overflowing(torch.optim.SGD):
    """Takes no third step, as under a gradient scaler after an overflow."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.05)
        self.calls = 0
        self.step = self.step_unless_it_overflows

    def step_unless_it_overflows(self, closure=None):
        self.calls += 1
        if self.calls % 3:
            return type(self).step(self, closure)
        if closure is not None:
            closure()


class Nested(torch.optim.SGD):
    """Trains biases with an optimizer of its own."""

    def __init__(self, model):
        parameters = sorted(model.parameters(), key=lambda parameter: -parameter.ndim)
        super().__init__(parameters, lr=0.0)
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        biases = parameters[len(matrices) :]
        self.others = [torch.optim.SGD(matrices, lr=0.05), torch.optim.SGD(biases, lr=0.01)]

    def step(self, closure=None):
        if closure is not None:
            closure()
        for other in self.others:
            other.step()


@pytest.mark.parametrize(("optimizer", "counted"), [(Overflowing, 6), (Nested, 8)])
def test_steps_that_are_skipped_and_those_of_nested_optimizers_are_not_counted(
    host, optimizer, counted
):
    first, second = host.train(Job(optimizer=optimizer))
    assert first.inner_steps == second.inner_steps == counted
    assert first.outer_steps == 2 and first.digest == second.digest


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


def test_evaluations_and_checkpoints_change_nothing_in_training(host, tmp_path):
    looked_at = Job(evaluate_every=1, save_every=1, folder=tmp_path)
    assert host.train(looked_at)[0].digest == host.train(Job())[0].digest


def test_a_checkpoint_has_the_global_weights(host, tmp_path):
    job = Job(steps=10, save_every=5, folder=tmp_path)
    host.train(job)
    first, second = (host.saved_weights(job, replica_id, 5) for replica_id in range(2))
    assert first.keys() == TinyMLP().state_dict().keys()
    assert are_equal(first, second)


# ---- resume ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, STREAMING], ids=["vanilla", "streaming"])
def test_a_run_continued_from_any_checkpoint_has_the_same_bits(host, settings, tmp_path):
    # With a delay of 1, a sync is in flight in every second one.
    job = Job(steps=9, save_every=1, folder=tmp_path, settings=settings, accumulate=2)
    whole = [each.digest for each in host.train(job)]
    for step in range(1, 9):
        continued = host.train(replace(job, resumes_at=step, save_every=0))
        assert [each.digest for each in continued] == whole, f"from step {step}"
        assert [each.inner_steps for each in continued] == [9, 9]


# ---- other groups ---------------------------------------------------------------------------


class NamesThree(TinyMLP):
    """Built by each group, in whose environment it says that the run has three."""

    def __init__(self, replica_id):
        super().__init__(replica_id)
        os.environ["NUM_REPLICA_GROUPS"] = "3"


def test_a_group_waits_for_as_many_groups_as_the_environment_says(host, monkeypatch):
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "3")
    settings = {"num_replicas": None, "start_timeout_s": 0.5}
    with pytest.raises(Exception, match="2 of 3 replica groups are connected"):
        host.train(Job(model=NamesThree, settings=settings))


LATE = Job(steps=16, settings={"num_replicas": 1}, is_late=True)


def test_a_group_that_joins_later_ends_with_the_others_and_equal(host):
    first, joiner = host.train(LATE)
    assert joiner.digest == first.digest
    assert (first.inner_steps, joiner.inner_steps) == (16, 8)
    assert first.outer_steps == joiner.outer_steps == 4


def test_a_group_that_joins_later_continues_at_the_step_of_the_others(host):
    assert [each.steps for each in host.train(LATE)] == [16, 16]


def test_a_group_goes_on_when_its_peer_is_killed(host):
    first, _ = host.train(Job(steps=16, dies=True))
    assert (first.inner_steps, first.outer_steps) == (16, 4)


def test_a_group_goes_on_when_a_step_of_its_peer_raises_whose_process_lives_on(host):
    first, failed = host.train(Job(steps=16, fails_at={1: 6}))
    assert (first.inner_steps, first.outer_steps) == (16, 4)
    assert failed is None


# ---- ends -----------------------------------------------------------------------------------


def test_what_was_trained_since_the_last_sync_is_in_the_final_one(host):
    whole, (first, second) = host.train(Job(steps=4)), host.train(Job(steps=6))
    assert first.digest == second.digest != whole[0].digest
    assert first.outer_steps == 2


def test_all_groups_may_end_early(host):
    first, second = host.train(Job(steps=12, stops_at=6))
    assert first.digest == second.digest
    assert (first.inner_steps, first.outer_steps) == (6, 2)


def one_batch(replica_id, count):
    return [batch(replica_id, 0)] * count


def test_a_second_fit_continues_where_the_first_has_ended(host):
    whole, twice = (
        host.train(Job(steps=8 // fits, fits=fits, batches=one_batch), num_replicas=1)[0]
        for fits in (1, 2)
    )
    assert (twice.inner_steps, twice.outer_steps) == (8, 2)
    assert twice.digest == whole.digest


def stop_at_6(folder, replica_id, step, model):
    if step == 5:
        (folder / f"{replica_id} is past the first sync").touch()
    if step == 6:  # a group that is still in it would end there
        wait_until(lambda: len([*folder.glob("* is past the first sync")]) == 2)
        (folder / "STOP").touch()


def test_the_folder_of_a_run_has_its_events_and_a_file_STOP_in_it_ends_training(host, tmp_path):
    looks = functools.partial(stop_at_6, tmp_path)
    for outcome in host.train(Job(steps=16, settings={"run_dir": str(tmp_path)}, looks=looks)):
        assert (outcome.inner_steps, outcome.outer_steps) == (8, 2)
    for group in range(2):
        events = (tmp_path / f"replica_{group}" / "events.jsonl").read_text()
        assert '"sync"' in events and '"end"' in events


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


class StepsInBackward(torch.optim.SGD):
    """Trains in hooks of the backward pass, as LOMO does, and has a step that does nothing."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.05)
        self.step = self.do_nothing
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.move)

    def do_nothing(self, closure=None):
        if closure is not None:
            closure()

    @torch.no_grad()
    def move(self, parameter):
        parameter.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_that_steps_in_backward_is_an_error_after_the_first_step(host, accumulate):
    # A host that goes on to a second step fails there, and that is no error here.
    job = Job(optimizer=StepsInBackward, accumulate=accumulate, fails_at={0: 2, 1: 2})
    error = r"the weights change, and the StepsInBackward .* does not step \(inner step 0\)"
    with pytest.raises(Exception, match=error):
        host.train(job)


def test_an_argument_out_of_range_is_an_error_of_one_line_before_any_peer_waits(host):
    settings = {"sync_every": 5, "num_fragments": 2}
    with pytest.raises(Exception, match="not divisible by num_fragments=2: use sync_every=4"):
        host.train(Job(settings=settings))
