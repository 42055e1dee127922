"""Finds the model and its optimizers in what a user gives, which a trainer may have wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

_CANNOT = {
    "DeepSpeedEngine": "DeepSpeed: use DDP or FSDP2",
    "FullyShardedDataParallel": "FSDP version 1: use FSDP2 (fsdp_version=2, or fully_shard)",
}
"""Models that cannot be a replica group's, by the class of one of their modules."""


def own_model(given: nn.Module) -> tuple[nn.Module, ProcessGroup | None]:
    """Return the model without the wrappers of DDP, ``torch.compile`` and Fabric.

    Returns:
        The model, and the ranks that DDP averages its gradients over; None without DDP.

    Raises:
        ValueError: It was wrapped by what cannot be a replica group.
    """
    ranks = None
    for module in given.modules():
        problem = _CANNOT.get(type(module).__name__)
        if problem is not None:
            raise ValueError(f"DiLoCo cannot train with {problem}")
    while True:
        if isinstance(given, DistributedDataParallel):
            ranks = given.process_group
            given = given.module
            continue
        compiled = getattr(given, "_orig_mod", None)
        inner = compiled or getattr(given, "_forward_module", None)
        if not isinstance(inner, nn.Module):
            return given, ranks
        given = inner


def own_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers whose steps move the weights, given one or several.

    Raises:
        ValueError: The steps of one cannot be watched.
    """
    several = given if isinstance(given, Sequence) else [given]
    if not several:
        raise ValueError("inner_optimizer=[]: give the optimizers that train the model")
    return [_own_optimizer(each) for each in several]


def _own_optimizer(given: Any) -> torch.optim.Optimizer:
    each = given
    while True:
        held = getattr(each, "__dict__", {})
        if "_optimizer_step_pre_hooks" in held:  # torch's Optimizer.__init__ makes it
            return each
        wrapped = getattr(each, "optimizer", None) or getattr(each, "base_optimizer", None)
        name = type(each).__name__
        if wrapped is None:
            raise ValueError(
                f"DiLoCo cannot watch the steps of {name}, which is no torch.optim.Optimizer, or "
                "does not call its __init__: give the optimizers that it steps, as a list"
            )
        own = held.get("state")
        if own is not None and own is not wrapped.state:
            raise ValueError(
                f"{name} moves the weights after the step of the {type(wrapped).__name__} in it, "
                "towards weights of its own, and so takes a part of each outer step back: train "
                f"without {name}. An outer optimizer looks ahead as well (outer_lr=0.5, "
                "outer_momentum=0)"
            )
        each = wrapped
