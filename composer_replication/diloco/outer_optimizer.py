"""The outer optimizer, the sign of the pseudo-gradient that it gets, and its step in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

OuterOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""A function of a fragment's global parameters that returns the optimizer over them."""

LANES = 16
"""Elements of the widest vector that torch computes in. Its fused kernel rounds what is left over
differently than its single operations do, so those take the rest."""


def nesterov_sgd(
    lr: float,
    momentum: float,
    nesterov: bool = True,
) -> OuterOptimizer:
    """The outer optimizer of DiLoCo (arXiv 2311.08105, section 3.1): SGD with Nesterov momentum.

    Without momentum Nesterov's rule is plain SGD, so ``nesterov`` then has no effect.
    """
    return lambda parameters: torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0
    )


def pseudo_gradient(
    global_parameter: Tensor,
    local_parameter: Tensor,
    into: Tensor | None = None,
) -> Tensor:
    """Global minus local, in the larger of their dtypes. The only place that knows the sign.

    Inner training took the parameters from ``global`` to ``local`` because that lowers the loss.
    A torch optimizer *descends*: it moves its parameter along minus the gradient it is given. So
    that one plain outer step with learning rate 1 lands where training went,

        global - 1.0 * pseudo_gradient  ==  local      =>      pseudo_gradient = global - local

    The reverse, local minus global, is "the update". Fed to the same optimizer it ascends with a
    learning rate of 0.7, and every sync still commits with equal digests: only the loss shows it.
    torchft had it reversed (its pull request 233), and code of that time compensates with
    ``SGD(maximize=True)``. With our sign that ascends, so ``check_sign`` rejects it.
    """
    return torch.sub(global_parameter, local_parameter, out=into)


def check_sign(outer_optimizer: OuterOptimizer) -> None:
    """Check on one parameter that an outer step moves it where training has moved it.

    The parameter starts at 0, where weight decay cannot hide a wrong sign.

    Raises:
        ValueError: The outer step moved away from the local parameter.
    """
    theta = nn.Parameter(torch.zeros(1))
    local = torch.full((1,), -0.5)
    optimizer = outer_optimizer([theta])
    theta.grad = pseudo_gradient(theta.detach(), local)
    optimizer.step()
    if theta.item() > 0:
        raise ValueError(
            f"the outer optimizer {describe(optimizer)} moved the global parameter from 0 to "
            f"{theta.item():g} although training moved it to -0.5. The pseudo-gradient is global "
            "minus local and is to be descended: use maximize=False and a learning rate >= 0"
        )


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Name and settings of an optimizer, equal for equal ones. They are part of the fingerprint."""
    settings = ", ".join(f"{name}={value}" for name, value in sorted(optimizer.defaults.items()))
    return f"{type(optimizer).__name__}({settings})"


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is SGD with nothing but momentum, like DiLoCo's outer optimizer."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1:
        return False
    group = optimizer.param_groups[0]
    return not any(group[name] for name in ("weight_decay", "dampening", "maximize"))


def take_sgd_step(
    group: Mapping[str, Any],
    divisor: Tensor,
    theta: Tensor,
    sums: Tensor,
    momentum: Tensor,
) -> None:
    """Take an outer step of ``torch.optim.SGD`` with momentum in a chunk of global parameters.

    It does to each element what torch does, in the same order, so the bits are the same, which a
    test checks. ``SGD.step`` goes over the whole tensor for each operation and allocates another
    one: eleven passes over memory and a buffer as large as the model. Here it is five, with torch's
    fused kernel on chunks, and the global parameters are still in cache when they are written into
    the model.

    Args:
        group: The optimizer's only ``param_groups``, see ``is_plain_sgd``.
        divisor: The sums divided by it are the mean pseudo-gradient. 0-D, where all of it is.
        theta: fp32, 1-D.
        sums: The sum of weighted pseudo-gradients, fp32, 1-D. It is overwritten.
        momentum: fp32, 1-D, zeros before the first step.
    """
    lr = float(group["lr"])
    decay = float(group["momentum"])
    fused = sums.numel() // LANES * LANES
    if fused:
        # torch.optim.SGD(fused=True) calls this too, but its overhead takes six times as long.
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
            [theta[:fused]],
            [sums[:fused]],
            [momentum[:fused]],
            weight_decay=0.0,
            momentum=decay,
            lr=lr,
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,
            grad_scale=divisor,  # it divides by that
        )
    if fused == sums.numel():
        return
    move = sums[fused:].div_(divisor)
    momentum = momentum[fused:].mul_(decay).add_(move)
    move = move.add_(momentum, alpha=decay) if group["nesterov"] else momentum
    theta[fused:].add_(move, alpha=-lr)
