"""DiLoCo's outer step on a CPU, chunk by chunk, so that each number is fetched from memory once."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16
"""The widest vector of fp32 that torch computes in: torch's fused step rounds what is left over
otherwise than its own parts do."""


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is SGD with momentum at most, as DiLoCo's outer optimizer is."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1:
        return False
    group = optimizer.param_groups[0]
    return not any(group[name] for name in ("weight_decay", "dampening", "maximize"))


class SGDStep:
    """An outer step of ``torch.optim.SGD``.

    It does to each element what torch does, in the same order, and so gets the same bits; a test
    holds the two together. Torch goes over all of a tensor for each operation and makes another one
    on the way: eleven passes over memory and a buffer as large as the model. Here it is five, by
    torch's own fused step on chunks, and the way back into the model finds the global parameters in
    cache.

    Args:
        optimizer: See ``is_plain_sgd``.
        divisor: What the sums are divided by to be the mean pseudo-gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, divisor: float) -> None:
        (group,) = optimizer.param_groups
        self._lr, self.momentum = float(group["lr"]), float(group["momentum"])
        self._nesterov, self._divisor = group["nesterov"], torch.tensor(divisor)

    def move(self, theta: Tensor, sums: Tensor, momentum: Tensor | None = None) -> None:
        """Move a chunk of the global parameters.

        Args:
            theta: fp32, 1-D.
            sums: Of pseudo-gradients; used up.
            momentum: 0 before the first step; None if the optimizer has none.
        """
        fused = 0
        if momentum is not None and (fused := sums.numel() // LANES * LANES):
            # What torch.optim.SGD(fused=True) calls, whose own way there takes six times as long.
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
