"""DiLoCo's outer step on a CPU, chunk by chunk, so that each number is fetched from memory once."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from composer_replication.diloco.averaging.weighted_mean import WeightedMean, cut
from composer_replication.diloco.shards import Shards

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
        theta: Global parameters, fp32 and contiguous, in the order of the mean.
        plain: The places of those that the optimizer does not move, and that become the mean.
        held: The places of those that stay what they are.
        shards: Which part of them this rank holds.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        theta: Sequence[nn.Parameter],
        plain: Collection[int],
        held: Collection[int],
        shards: Shards,
    ) -> None:
        (group,) = optimizer.param_groups
        self._lr, self._momentum = float(group["lr"]), float(group["momentum"])
        self._nesterov = group["nesterov"]
        self._theta = theta
        self._plain = plain
        self._held = held
        self._shards = shards
        self._momenta: list[Tensor] = list(theta)  # itself where there is none
        self._is_first: set[int] = set()
        self.momentum_norm = 0.0
        """L2 of this rank's part, once all steps have been taken."""
        for place, parameter in enumerate(theta) if self._momentum else ():
            if place in plain or place in held:
                continue
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.empty_like(parameter, requires_grad=False)
                self._is_first.add(place)
            self._momenta[place] = state["momentum_buffer"]

    def steps(self, mean: WeightedMean) -> Iterator[Tensor]:
        """Take it piece by piece, and give the global parameters of each that has moved.

        Args:
            mean: Received; it is used up.
        """
        squares = [torch.zeros(())]
        total = torch.tensor(mean.divisor)
        for piece, theta, sums, momentum in zip(
            mean.pieces,
            cut(self._theta, mean.pieces),
            mean.sums(),
            cut(self._momenta, mean.pieces),
            strict=True,
        ):
            if piece.tensor in self._held:
                pass
            elif piece.tensor in self._plain:
                theta.sub_(sums.div_(total))
            elif not self._momentum:
                theta.add_(sums.div_(total), alpha=-self._lr)
            else:
                self._move(theta, sums, momentum, total, piece.tensor in self._is_first)
                square = torch.dot(momentum, momentum)
                squares.append(self._shards.own_part(square, piece.tensor))
            yield theta
        self.momentum_norm = math.sqrt(float(torch.stack(squares).sum()))

    def _move(
        self, theta: Tensor, sums: Tensor, momentum: Tensor, total: Tensor, is_first: bool
    ) -> None:
        fused = 0 if is_first else sums.numel() // LANES * LANES
        rest = sums.numel() - fused
        if rest:
            self._by_parts(theta[fused:], sums[fused:].div_(total), momentum[fused:], is_first)
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
                grad_scale=total,  # it divides by that
            )

    def _by_parts(self, theta: Tensor, delta: Tensor, momentum: Tensor, is_first: bool) -> None:
        if is_first:
            momentum.copy_(delta)
        else:
            momentum.mul_(self._momentum).add_(delta)
        move = delta.add_(momentum, alpha=self._momentum) if self._nesterov else momentum
        theta.add_(move, alpha=-self._lr)
