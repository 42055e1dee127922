"""DiLoCo's outer step on a CPU in chunks, so that each number is read from memory once."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16
"""Elements of the widest vector that torch computes in. Its fused kernel rounds what is left over
differently than its single operations do, so those take the rest."""


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is SGD with nothing but momentum, like DiLoCo's outer optimizer."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1:
        return False
    group = optimizer.param_groups[0]
    return not any(group[name] for name in ("weight_decay", "dampening", "maximize"))


class SGDStep:
    """An outer step of ``torch.optim.SGD``.

    It does to each element what torch does, in the same order, so the bits are the same, which a
    test checks. ``SGD.step`` goes over the whole tensor for each operation and allocates another
    one: eleven passes over memory and a buffer as large as the model. Here it is five, with torch's
    fused kernel on chunks, and the global parameters are still in cache when they are written into
    the model.

    Args:
        optimizer: See ``is_plain_sgd``.
        divisor: The sums divided by it are the mean pseudo-gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, divisor: float) -> None:
        (group,) = optimizer.param_groups
        self._lr, self.momentum = float(group["lr"]), float(group["momentum"])
        self._nesterov, self._divisor = group["nesterov"], torch.tensor(divisor)

    def move(self, theta: Tensor, sums: Tensor, momentum: Tensor | None = None) -> None:
        """Move a chunk of the global parameters.

        Args:
            theta: fp32, 1-D.
            sums: The sum of weighted pseudo-gradients, fp32, 1-D. It is overwritten.
            momentum: fp32, 1-D, zeros before the first step; None if the optimizer has none.
        """
        fused = 0
        if momentum is not None and (fused := sums.numel() // LANES * LANES):
            # torch.optim.SGD(fused=True) calls this too, but its overhead takes six times as long.
            torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
                [theta[:fused]],
                [sums[:fused]],
                [momentum[:fused]],
                weight_decay=0.0,
                momentum=self.momentum,
                lr=self._lr,
                dampening=0.0,
                nesterov=self._nesterov,
                maximize=False,
                is_first_step=False,
                grad_scale=self._divisor,  # it divides by that
            )
        if fused == sums.numel():
            return
        move = sums[fused:].div_(self._divisor)
        if momentum is not None:
            momentum = momentum[fused:].mul_(self.momentum).add_(move)
            move = move.add_(momentum, alpha=self.momentum) if self._nesterov else momentum
        theta[fused:].add_(move, alpha=-self._lr)
