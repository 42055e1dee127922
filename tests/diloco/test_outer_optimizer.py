"""The sign, and who owns the global parameters."""

import pytest
import torch
from common import Constant
from torch import nn

from composer_replication.diloco import outer_optimizer
from composer_replication.diloco.fragments import split_model
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.outer_optimizer import (
    check_sign,
    nesterov_sgd,
    pseudo_gradient,
)
from composer_replication.diloco.outer_state import load_outer_state, outer_state

CPU = torch.device("cpu")


def own(model, factory=None):
    return GlobalParameters(split_model(model)[0], factory or nesterov_sgd(momentum=0.9), CPU)


def test_the_pseudo_gradient_is_global_minus_local_in_the_global_dtype():
    delta = pseudo_gradient(torch.tensor([10.0]), torch.tensor([9.0], dtype=torch.bfloat16))
    assert delta.item() == 1.0 and delta.dtype == torch.float32


def test_the_guard_passes_optimizers_that_descend():
    check_sign(nesterov_sgd(momentum=0.9))
    check_sign(lambda p: torch.optim.SGD(p, lr=0.0))
    check_sign(lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1))


def test_the_guard_refuses_an_optimizer_that_ascends():
    with pytest.raises(ValueError, match="use maximize=False"):
        check_sign(lambda p: torch.optim.SGD(p, lr=0.7, maximize=True))


def test_the_guard_refuses_a_pseudo_gradient_with_the_sign_turned(monkeypatch):
    monkeypatch.setattr(outer_optimizer, "pseudo_gradient", lambda theta, local: local - theta)
    with pytest.raises(ValueError, match="although training moved it to -0.5"):
        check_sign(nesterov_sgd(momentum=0.9))


def test_without_momentum_nesterov_is_plain_sgd():
    (theta,) = (nn.Parameter(torch.tensor([10.0])),)
    optimizer = nesterov_sgd(lr=1.0, momentum=0.0, nesterov=True)([theta])
    theta.grad = torch.tensor([2.0])
    optimizer.step()
    assert theta.item() == 8.0


def test_a_bf16_model_loses_no_small_update():
    # 100 outer steps of 1e-5 at 0.02: bf16 state rounds most of each away, fp32 keeps all.
    model = Constant(0.02, dtype=torch.bfloat16)
    held = own(model, lambda p: torch.optim.SGD(p, lr=1.0))
    start = held.theta["weight"].item()
    for _ in range(100):
        held.theta["weight"].grad = torch.full((1,), 1e-5)
        held.optimizer.step()
    assert start - held.theta["weight"].item() == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("local", "alpha", "back"),
    [
        (4.0, 0.25, 0.25 * 4.0 + 0.75 * 8.0),  # as the streaming paper says
        (float("nan"), 0.0, 8.0),  # torchft's lerp_ keeps it: 0 * nan is nan
    ],
)
def test_write_back_mixes_and_cures_a_nan(local, alpha, back):
    model = Constant(local)
    held = own(model)
    with torch.no_grad():
        held.theta["weight"].fill_(8.0)
    held.write_back(alpha)
    assert model.weight.item() == back


def test_layouts_survive_the_way_there_and_back():
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = conv.weight.detach().clone()
    held = own(conv)
    held.write_back()
    assert torch.equal(conv.weight, before)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("factory", "message"), [
    (lambda p: None, "outer_optimizer returned NoneType"),
    (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "over other parameters"),
])  # fmt: skip
def test_an_outer_optimizer_over_anything_else_is_refused(factory, message):
    with pytest.raises(ValueError, match=message):
        own(Constant(), factory)


def test_a_state_is_a_copy_comes_back_whole_and_what_was_loaded_is_its_own():
    # A joiner's next download may be written into the memory of the one before.
    held, other = own(Constant(10.0)), own(Constant(99.0))

    def step(globals_):
        globals_.theta["weight"].grad = torch.ones(1)
        globals_.optimizer.step()

    step(held)
    state = outer_state(held)
    step(held)
    load_outer_state(other, state)
    (momentum,) = state["optimizer"]["state"].values()
    momentum["momentum_buffer"].fill_(7.0)
    state["theta"]["weight"].fill_(7.0)
    assert other.step_norms().momentum == 1.0
    assert other.theta["weight"].item() == pytest.approx(10 - 0.7 * 1.9)
    step(other)
    assert torch.equal(other.theta["weight"], held.theta["weight"])
