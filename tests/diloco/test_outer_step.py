"""The outer step by chunks is torch's, to the bit. Run: pytest tests/diloco/test_outer_step.py"""

import copy
from functools import partial

import pytest
import torch
from common import mean_of
from torch import nn

from composer_replication.diloco.averaging.weighted_mean import CHUNK
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.outer_step import is_plain_sgd

CPU = torch.device("cpu")
SHAPES = [(3,), (CHUNK + 1,), (7, 5), (), (2, CHUNK)]
OUTER = {
    "diloco": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "heavy ball": {"lr": 0.3, "momentum": 0.9},
    "plain": {"lr": 1.0},
}


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for index, shape in enumerate(SHAPES):
            values = torch.randn(shape, generator=draw).to(dtype)
            self.register_parameter(f"p{index}", nn.Parameter(values))
        self.conv = nn.Conv2d(3, 8, 3, dtype=dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
@pytest.mark.slow
def test_every_bit_is_that_of_torch(outer, dtype, alpha):
    model = Model(dtype)
    assert not model.conv.weight.is_contiguous()
    plain = copy.deepcopy(model)
    built = partial(torch.optim.SGD, **outer)
    globals_ = GlobalParameters(dict(model.named_parameters()), built, CPU)
    theta = [t.detach().clone().requires_grad_() for t in globals_.theta.values()]
    reference = built(theta)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        deltas = [[torch.randn(t.shape, generator=draw) for t in theta] for _ in range(2)]
        globals_.take_outer_step(mean_of(globals_.share, deltas, [1.0, 2.0]), alpha)
        for t, one, other in zip(theta, *deltas, strict=True):
            t.grad = (one + 2 * other) / 3
        reference.step()
        with torch.no_grad():
            for local, t in zip(plain.parameters(), theta, strict=True):
                local.copy_(t if alpha == 0.0 else t.lerp(local.float(), alpha))
        for mine, t in zip(globals_.theta.values(), theta, strict=True):
            assert torch.equal(mine, t)
        for mine, local in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, local) and mine.stride() == local.stride()
    state, expected = globals_.optimizer.state_dict(), reference.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    norms = []
    for place, kept in expected["state"].items():
        if kept.get("momentum_buffer") is not None:
            assert torch.equal(state["state"][place]["momentum_buffer"], kept["momentum_buffer"])
            norms.append(kept["momentum_buffer"].norm())
    expected_norm = float(torch.stack(norms).norm()) if norms else 0.0
    assert globals_.step_norms().momentum == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize("other", [
    lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    lambda parameters: torch.optim.SGD(parameters, lr=0.7, weight_decay=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, dampening=0.1),
])  # fmt: skip
def test_any_other_outer_optimizer_takes_its_own_step(other):
    model = Model(torch.float32)
    globals_ = GlobalParameters(dict(model.named_parameters()), other, CPU)
    assert not is_plain_sgd(globals_.optimizer)
    theta = [t.detach().clone().requires_grad_() for t in globals_.theta.values()]
    reference = other(theta)
    deltas = [[torch.full(t.shape, 0.5) for t in theta]]
    for _ in range(2):
        globals_.take_outer_step(mean_of(globals_.share, deltas))
        for t in theta:
            t.grad = torch.full_like(t, 0.5)
        reference.step()
        for mine, t, local in zip(globals_.theta.values(), theta, model.parameters(), strict=True):
            assert torch.equal(mine, t) and torch.equal(local, t)
