"""What the study tries and the package does not have: optimizers, and averaged inner momenta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cells import Cell
from torch import Tensor, nn
from torch.distributed import ReduceOp

from examples.quickstart.muon import Muon, muon_update


class RisingMomentum(torch.optim.SGD):
    """The outer SGD, with a momentum of t / (t + ramp) in outer step t, up to a largest one."""

    ramp: float
    most: float
    taken: int

    @classmethod
    def of(cls, cell: Cell) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
        """What DiLoCo takes as ``outer_optimizer``."""

        def build(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            own = cls(parameters, lr=cell.outer_lr, momentum=cell.outer_momentum, nesterov=True)
            own.ramp, own.most, own.taken = cell.ramp, cell.outer_momentum, 0
            return own

        return build

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        if all(p.grad is None for p in group["params"]):  # torchft's call after DiLoCo's own step
            return None
        self.taken += 1
        group["momentum"] = min(self.most, self.taken / (self.taken + self.ramp))
        return super().step(closure)


class QuasiHyperbolicMuon(Muon):
    """Muon whose step is made of its momentum, in a share, and of the gradient (arXiv 2510.05361).

    The momentum is slow there, and the gradient makes the step follow what is new.
    """

    share: float

    def _step_muon(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        for p in trained:
            momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            momentum.lerp_(p.grad, 1 - group["momentum"])
            mixed = p.grad.lerp(momentum, self.share)  # pyright: ignore[reportOptionalMemberAccess]
            p.add_(muon_update(mixed), alpha=-group["lr"])


def fill_inner_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that an inner optimizer has after its first step, all of it 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p in parameters:
        for value in optimizer.state[p].values():
            value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@torch.no_grad()
def average_inner_state(
    manager: Any,
    optimizer: torch.optim.Optimizer,
    periods: Sequence[int],
    outer_step: int,
    share: float,
) -> None:
    """Average the inner optimizers' state over the groups of a sync.

    Args:
        manager: Of the simulation, right after the sync.
        optimizer: Of this group, with all of its state.
        periods: See ``Cell``.
        outer_step: The number of the sync.
        share: How much this group's state counts.
    """
    momenta, squares = periods
    slow = ("exp_avg_sq", "step")  # AdamW's squared gradients, and the number of them in the sum
    averaged = [
        value
        for group in optimizer.param_groups
        for p in group["params"]
        for name, value in sorted(optimizer.state[p].items())
        if outer_step % (squares if name in slow else momenta) == 0
    ]
    if not averaged:
        return
    flat = torch.cat([value.flatten() * share for value in averaged] + [torch.tensor([share])])
    manager.allreduce(flat, reduce_op=ReduceOp.SUM).wait()
    *parts, total = flat.split([value.numel() for value in averaged] + [1])
    for value, part in zip(averaged, parts, strict=True):
        value.copy_((part / total).view_as(value))
