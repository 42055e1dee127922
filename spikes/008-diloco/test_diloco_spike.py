"""Spike 008 / ADR-003: 2 replicas, 4 inner steps, 2 outer rounds, mock allreduce, TinyMLP.

pytest spikes/008-diloco
"""

import pytest
import torch
import torchft.local_sgd
from torch import nn

from composer_replication import DiLoCo, simulate

REPLICAS, INNER_STEPS, ROUNDS = 2, 4, 2


class TinyMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


def initial_state():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(value.shape, generator=generator) * 0.3
        for name, value in TinyMLP().state_dict().items()
    }


def stock(manager, model, inner):
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = torchft.local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=INNER_STEPS)
    return diloco, outer


def ours(manager, model, inner):
    numbers = {"outer_lr": 0.7, "outer_momentum": 0.9}  # those of torchft's documentation
    diloco = DiLoCo(manager, model, inner, sync_every=INNER_STEPS, **numbers)
    return diloco, diloco._outer.fragments[0].globals.optimizer


def replica(sim, build, start):
    model = TinyMLP()
    model.load_state_dict(start)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco, outer = build(sim.manager, model, inner)
    data = torch.Generator().manual_seed(sim.replica_id)
    after_sync = []
    with diloco:
        first = sim.manager.current_step()
        for step in range(1, INNER_STEPS * ROUNDS + 1):
            x = torch.randn(16, 4, generator=data)
            inner.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            inner.step()
            if step % INNER_STEPS == 0:
                after_sync.append({k: v.clone() for k, v in model.state_dict().items()})
    momentum = [state["momentum_buffer"] for state in outer.state.values()]
    return after_sync, momentum, sim.manager.current_step() - first


@pytest.mark.parametrize("build", [stock, ours])
def test_two_replicas_train_one_model(build):
    start = initial_state()
    one, other = simulate(lambda sim: replica(sim, build, start), num_replicas=REPLICAS)
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine), "replicas differ"
    for before, after in zip([start, *one[0]], one[0], strict=False):
        assert all(not torch.equal(before[name], after[name]) for name in after), "did not move"
    assert len(one[1]) == 4 and all(buffer.abs().sum() > 0 for buffer in one[1])
    assert one[2] == other[2] == ROUNDS
