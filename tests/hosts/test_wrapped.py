"""``DiLoCo`` finds the model and its optimizers in what wraps them. Run: pytest tests/hosts

Real: accelerate, Fabric and torch_optimizer where they are installed; a manager without a network.
"""

from __future__ import annotations

import contextlib
import copy
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import TinyMLP, are_equal, batch, mse
from torch import nn

from composer_replication import DiLoCo, make_manager, simulate
from hosts.host import FarFromZero, as_processes, group_of, weights_of
from hosts.test_hosts import check_trace, sgd

SETTINGS = {"sync_every": 4, "outer_lr": 1.0, "outer_momentum": 0.0, "schedule": []}


def alone(model, optimizer, **changed):
    return DiLoCo(make_manager(num_replicas=1), model, optimizer, **{**SETTINGS, **changed})


# ---- one optimizer, wrapped ------------------------------------------------------------------


def test_40_steps_are_those_of_accelerate_alone_bit_for_bit():
    accelerate = pytest.importorskip("accelerate")

    def train(with_diloco):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW((model := FarFromZero()).parameters(), lr=1e-3)
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        model, optimizer, rates = accelerator.prepare(model, optimizer, rates)
        diloco = alone(model, optimizer) if with_diloco else None
        with diloco or contextlib.nullcontext():
            for number in range(80):
                with accelerator.accumulate(model):
                    accelerator.backward(mse(model, *batch(0, number)))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    rates.step()
                    optimizer.zero_grad()
            if diloco is not None:
                diloco.final_sync()
                assert (diloco.inner_steps, diloco.outer_step) == (40, 10)
        return model.state_dict()

    own, expected = train(True), train(False)
    assert not torch.equal(expected["layers.0.weight"], FarFromZero().layers[0].weight)
    assert are_equal(own, expected)


def test_the_loop_of_fabric_counts_real_steps_under_the_models_own_names():
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    own = TinyMLP()
    model, optimizer = fabric.setup(own, sgd(own))
    with alone(model, optimizer) as diloco:
        for number in range(8):
            optimizer.zero_grad()
            fabric.backward(mse(model, *batch(0, number)))
            optimizer.step()
        diloco.final_sync()
        assert diloco.global_parameters().keys() == TinyMLP().state_dict().keys()
    assert (diloco.inner_steps, diloco.outer_step) == (8, 2)


def train_with_fabric(process, job):
    group = group_of(process, job)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # as torchrun and `fabric run` set it
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=job.ranks, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(own := job.model(group.replica_id), job.optimizer(own))
    arguments = job.arguments(group.replica_id, group.num_replicas)
    del arguments["replica_id"]  # the manager's
    batches = job.batches(group.replica_id, job.steps * job.ranks)
    with group.manager() as manager, DiLoCo(manager, model, optimizer, **arguments) as diloco:
        for inputs, targets in batches[fabric.global_rank :: job.ranks]:
            optimizer.zero_grad()
            fabric.backward(mse(model, inputs, targets))
            optimizer.step()
        diloco.final_sync()
    return SimpleNamespace(weights=weights_of(own), outer_steps=diloco.outer_step)


@pytest.mark.integration
def test_groups_of_two_ranks_of_fabric_follow_the_trace_that_was_computed_by_hand(tmp_path):
    pytest.importorskip("lightning")
    host = SimpleNamespace(train=partial(as_processes, train_with_fabric))
    check_trace(host, ranks=2, folder=tmp_path)


def test_a_compiled_model_has_the_names_of_the_model():
    model = TinyMLP()
    diloco = alone(torch.compile(model, backend="eager"), sgd(model))
    assert diloco.global_parameters().keys() == model.state_dict().keys()


class Delegates:
    """Steps an optimizer, as accelerate's wrapper does."""

    def __init__(self, wrapped):
        self.base_optimizer = wrapped

    def step(self):
        self.base_optimizer.step()


class Chain:
    """Steps several optimizers, and is none itself."""

    def __init__(self, *optimizers):
        self.chained = optimizers


class LooksAhead(torch.optim.Optimizer):
    """Has torch_optimizer.Lookahead's attributes: its own state, and no ``super().__init__``."""

    def __init__(self, optimizer):
        self.optimizer, self.state = optimizer, {}
        self.param_groups = optimizer.param_groups


def lookahead(optimizer):
    return pytest.importorskip("torch_optimizer").Lookahead(optimizer)


def test_a_wrapper_in_a_wrapper_is_looked_through():
    optimizer = Delegates(Delegates(sgd(model := TinyMLP())))
    with alone(model, optimizer) as diloco:
        for number in range(4):
            mse(model, *batch(0, number)).backward()
            optimizer.step()
    assert (diloco.inner_steps, diloco.outer_step) == (4, 1)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda optimizer: None, "cannot watch the steps of NoneType"),
        (Chain, "cannot watch the steps of Chain, .* give the optimizers that it steps, as a list"),
        (LooksAhead, "LooksAhead moves the weights after the step of the SGD .* train without"),
        (lookahead, "Lookahead moves the weights after the step of the SGD .* train without"),
    ],
)
def test_what_cannot_be_watched_is_refused_in_one_short_sentence(wrap, message):
    with pytest.raises(ValueError, match=message) as raised:
        alone(model := TinyMLP(), wrap(sgd(model)))
    assert len(str(raised.value)) <= 300


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FullyShardedDataParallel", "cannot train with FSDP version 1: use FSDP2"),
        ("DeepSpeedEngine", "cannot train with DeepSpeed: use DDP or FSDP2"),
    ],
)
def test_what_cannot_be_a_replica_group_is_refused_by_name(name, message):
    # These need a process group, or a package, to wrap a model: one with the name of their class.
    wrapper = type(name, (nn.Sequential,), {})
    with pytest.raises(ValueError, match=message):
        alone(wrapper(model := TinyMLP()), sgd(model))


# ---- several optimizers ----------------------------------------------------------------------


def halves():
    torch.manual_seed(0)
    models = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
    return models, [sgd(models[0], 0.1), sgd(models[1], 0.2)]


def train(models, optimizers, steps, first=0):
    """A step of each optimizer for each batch, as in a loop for actor and critic."""
    for number in range(first, first + steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            (model(inputs) - 1).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("before_the_last", [None, DiLoCo.expect_last_step, DiLoCo.sync_idle])
@pytest.mark.parametrize("steps", [8, 9, 10])
@pytest.mark.parametrize("counted", [0, 1])
def test_several_optimizers_train_as_they_do_without_diloco(steps, counted, before_the_last):
    (models, optimizers), (expected, own) = halves(), halves()
    with alone(models, [optimizers[counted], optimizers[1 - counted]]) as diloco:
        train(models, optimizers, steps - 1)
        if before_the_last is not None:
            before_the_last(diloco)
        train(models, optimizers, 1, steps - 1)
        diloco.final_sync()
    train(expected, own, steps)
    assert diloco.inner_steps == steps
    for one, other in zip(models.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_step_of_the_first_one_is_an_inner_step_and_others_may_step_more_or_less_often():
    for own, others in ((1, 3), (3, 1)):
        models, optimizers = halves()
        with alone(models, optimizers) as diloco:
            for number in range(4):
                train(models[:1], optimizers[:1], own, number)
                train(models[1:], optimizers[1:], others, number)
            before = copy.deepcopy(models.state_dict())
            diloco.final_sync()
        assert diloco.inner_steps == 4 * own
        for name, tensor in models.state_dict().items():  # nothing of the last steps is lost
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:fragment_sync_delay=1 with fragment_update_alpha=0")
@pytest.mark.parametrize(("alpha", "outer_steps"), [(0.5, 2), (0.0, 1)])
def test_a_last_step_of_another_one_while_a_sync_is_in_flight_is_sent_if_it_is_kept(
    alpha, outer_steps
):
    models, (first, other) = halves()
    delay = {"sync_every": 2, "fragment_sync_delay": 1, "fragment_update_alpha": alpha}
    with alone(models, [first, other], **delay) as diloco:
        train(models[:1], [first], 1)
        sent = models[1].weight.detach().clone()
        train(models[1:], [other], 1)
        trained = models[1].weight.detach().clone()
        diloco.final_sync()
    assert not torch.equal(sent, trained)
    torch.testing.assert_close(models[1].weight.detach(), sent.lerp(trained, alpha))
    assert diloco.outer_step == outer_steps


@pytest.mark.parametrize("synced", [0, 4])
def test_an_overflow_of_the_first_one_is_no_error_and_loses_no_step_of_another_one(synced):
    models, (_, other) = halves()
    first = torch.optim.SGD(models[0].parameters(), lr=0.1, fused=True)
    with alone(models, [first, other]) as diloco:
        train(models[:1], [first], synced)
        train(models[1:], [other], 1)
        first.found_inf = torch.tensor(1.0)  # as torch's GradScaler tells a fused optimizer
        train(models[:1], [first], 1)
        del first.found_inf
        diloco.forget_counted()
        if not synced:
            train(models[:1], [first], 1)
        trained = models[1].weight.detach().clone()
        diloco.final_sync()
    torch.testing.assert_close(models[1].weight.detach(), trained)


def test_groups_with_several_optimizers_end_equal_with_weights_of_samples_too():
    def replica(sim):
        models, optimizers = halves()
        settings = {"sync_every": 4, "weight_by": "samples", "digest_every": 1}
        with DiLoCo(sim.manager, models, optimizers, **settings) as diloco:
            for number in range(6):
                diloco.count_samples(8)
                train(models, optimizers, 1, 10 * sim.replica_id + number)
            diloco.final_sync()
            return diloco.global_digest(), models[1].weight.tolist()

    first, second = simulate(replica, num_replicas=2)
    assert first == second


def test_a_first_optimizer_that_never_steps_is_an_error_and_costs_no_weights():
    models, optimizers = halves()
    with alone(models, optimizers) as diloco:
        train(models[1:], optimizers[1:], 8)
        trained = models[1].weight.clone()
        with pytest.raises(ValueError, match="the SGD that DiLoCo was given does not step"):
            diloco.final_sync()
    assert torch.equal(models[1].weight, trained)


def test_parameters_that_no_optimizer_or_no_fragment_has_are_named():
    models, optimizers = halves()
    with pytest.raises(ValueError, match="not in the inner optimizer: 1.weight, 1.bias"):
        alone(models, optimizers[:1])
    with pytest.raises(ValueError, match=r"in no fragment: \[1\].param_groups\[0\]\['params'\]"):
        alone(models[0], optimizers)
    with pytest.raises(ValueError, match=r"inner_optimizer=\[\]: give the optimizers"):
        alone(models, [])
