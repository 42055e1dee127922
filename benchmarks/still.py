"""What the benchmarks of a sync share: a model, and an inner optimizer that costs nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Still(torch.optim.Optimizer):
    """An inner optimizer that moves one number of each tensor, so that each has outer momentum."""

    def __init__(self, parameters: Any) -> None:
        own = list(parameters)
        super().__init__(own, {})
        self._first_numbers = [parameter.detach().view(-1)[:1] for parameter in own]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Next to no step at all."""
        torch._foreach_mul_(self._first_numbers, 0.9)  # bfloat16 would round 0.999 back


def build_model(params: int, tensors: int, device: str = "cpu", dtype: str = "float32") -> Any:
    """Parameters of equal sizes but for the last one, the same in every process."""
    model = nn.Module()
    size = params // tensors
    for index in range(tensors):
        numel = size if index < tensors - 1 else params - size * (tensors - 1)
        weight = torch.empty(numel).uniform_(-1, 1, generator=torch.Generator().manual_seed(index))
        model.register_parameter(f"p{index}", nn.Parameter(weight))
    return model.to(device=device, dtype=getattr(torch, dtype))
