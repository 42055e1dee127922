"""The outer optimizer, and the sign of the pseudo-gradient that it gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from composer_replication.settings import OUTER_LR, OUTER_MOMENTUM

OuterOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""A function of a fragment's global parameters that returns the optimizer over them."""


def nesterov_sgd(
    lr: float = OUTER_LR, momentum: float = OUTER_MOMENTUM, nesterov: bool = True
) -> OuterOptimizer:
    """The outer optimizer of DiLoCo (arXiv 2311.08105, section 3.1): SGD with Nesterov momentum.

    Without momentum Nesterov's rule is plain SGD, so ``nesterov`` then has no effect.
    """
    return lambda parameters: torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0
    )


def pseudo_gradient(
    global_parameter: Tensor, local_parameter: Tensor, into: Tensor | None = None
) -> Tensor:
    """Global minus local, in the dtype of ``global_parameter``. The only place that knows the sign.

    Inner training took the parameters from ``global`` to ``local`` because that lowers the loss.
    A torch optimizer *descends*: it moves its parameter along minus the gradient it is given. So
    that one plain outer step with learning rate 1 lands where training went,

        global - 1.0 * pseudo_gradient  ==  local      =>      pseudo_gradient = global - local

    The reverse, local minus global, is "the update". Fed to the same optimizer it ascends with a
    learning rate of 0.7, and every sync still commits with equal digests: only the loss shows it.
    torchft had it reversed (its pull request 233), and code of that time compensates with
    ``SGD(maximize=True)``. With our sign that ascends, so ``check_sign`` rejects it.
    """
    return torch.sub(global_parameter, local_parameter.to(global_parameter.dtype), out=into)


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
