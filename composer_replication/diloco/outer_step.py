"""DiLoCo's outer step on a CPU, chunk by chunk, so that each number is fetched from memory once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from composer_replication.diloco.averaging.weighted_mean import chunks_of

LANES = 16
"""The widest vector of fp32 that torch computes in: torch's fused step rounds what is left over
otherwise than its own parts do."""


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is SGD with momentum at most, as DiLoCo's outer optimizer is."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1:
        return False
    group = optimizer.param_groups[0]
    return not any(group[name] for name in ("weight_decay", "dampening", "maximize"))


class ChunkedDescent:
    """An outer step of ``torch.optim.SGD``.

    It does to each element what torch does, in the same order, and so gets the same bits; a test
    holds the two together. Torch goes over all of a tensor for each operation and makes another one
    on the way: eleven passes over memory and a buffer as large as the model. Here it is five, by
    torch's own fused step on chunks, and the way back into the model finds the global parameters in
    cache.

    Args:
        optimizer: See ``is_plain_sgd``. Its state is used and kept, so that it may be saved.
        momentum: Where the momentum of each tensor goes that has none yet, fp32, in its shape.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, momentum: Sequence[Tensor]) -> None:
        (group,) = optimizer.param_groups
        self._lr, self._momentum = float(group["lr"]), float(group["momentum"])
        self._nesterov = group["nesterov"]
        self._state = optimizer.state
        self._memory = momentum
        self._divisor = torch.tensor(1.0)

    def steps(
        self, theta: nn.Parameter, index: int, sums: Tensor, divisor: float, chunk: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Move one tensor, chunk by chunk; each is given when it has moved, with its momentum.

        The third is the square of the chunk's sums, which are then in cache for the step.

        Args:
            theta: Global parameters, fp32 and contiguous.
            index: Which of the fragment's.
            sums: Of pseudo-gradients, 1-D; used up.
            divisor: What they are divided by to be the mean.
            chunk: How many elements at a time.
        """
        self._divisor = torch.tensor(divisor)
        flat = theta.detach().view(-1)
        if not self._momentum:
            for part, total in zip(chunks_of(flat, chunk), chunks_of(sums, chunk), strict=True):
                square = torch.dot(total, total)
                yield part.add_(total.div_(self._divisor), alpha=-self._lr), part[:0], square
            return
        state = self._state[theta]
        is_first = state.get("momentum_buffer") is None
        if is_first:
            state["momentum_buffer"] = self._memory[index]
        momenta = state["momentum_buffer"].view(-1)
        parts = (chunks_of(each, chunk) for each in (flat, sums, momenta))
        for part, total, momentum in zip(*parts, strict=True):
            square = torch.dot(total, total)
            self._move(part, total, momentum, is_first)
            yield part, momentum, square

    def _move(self, theta: Tensor, sums: Tensor, momentum: Tensor, is_first: bool) -> None:
        fused = 0 if is_first else sums.numel() // LANES * LANES
        rest = sums.numel() - fused
        if rest:
            self._by_parts(
                theta[fused:], sums[fused:].div_(self._divisor), momentum[fused:], is_first
            )
            theta, sums, momentum = theta[:fused], sums[:fused], momentum[:fused]
        if fused:
            # What torch.optim.SGD(fused=True) calls, whose own way there takes six times as long.
            torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
                [theta],
                [sums],
                [momentum],
                weight_decay=0.0,
                momentum=self._momentum,
                lr=self._lr,
                dampening=0.0,
                nesterov=self._nesterov,
                maximize=False,
                is_first_step=False,
                grad_scale=self._divisor,  # it divides by that
            )

    def _by_parts(self, theta: Tensor, delta: Tensor, momentum: Tensor, is_first: bool) -> None:
        if is_first:
            momentum.copy_(delta)
        else:
            momentum.mul_(self._momentum).add_(delta)
        move = delta.add_(momentum, alpha=self._momentum) if self._nesterov else momentum
        theta.add_(move, alpha=-self._lr)
