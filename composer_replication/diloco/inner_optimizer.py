"""The inner optimizer's state, also for optimizers that wrap another one, such as SAM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizer, the one that it wraps, and so on to the one that takes the steps.

    A wrapper has the wrapped optimizer as ``base_optimizer``, in Composer's SAM as in most. Neither
    the wrapper's ``state`` nor its ``state_dict()`` contains the wrapped one's state.
    """
    chain = [optimizer]
    while isinstance(wrapped := getattr(chain[-1], "base_optimizer", None), Optimizer):
        chain.append(wrapped)
    return chain


def clear_state(optimizer: Optimizer) -> None:
    """Reset the optimizer's state: moments, and the perturbation that SAM would undo."""
    for each in with_wrapped(optimizer):
        each.state.clear()


def save_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the states of the optimizer and of those that it wraps, the outermost first."""
    return [each.state_dict() for each in with_wrapped(optimizer)]


def load_state(optimizer: Optimizer, states: Sequence[dict[str, Any]]) -> None:
    """Load what ``save_state`` returned in another group.

    Args:
        optimizer: This group's inner optimizer.
        states: The donor's states.

    Raises:
        ValueError: The donor's optimizer wraps another number of optimizers.
    """
    optimizers = with_wrapped(optimizer)
    if len(states) != len(optimizers):
        raise ValueError(
            f"the donor sent the states of {len(states)} nested inner optimizers, and this group "
            f"has {len(optimizers)} "
            f"({' around '.join(type(each).__name__ for each in optimizers)}): use the same in all "
            "replica groups, or heal_inner_state='own'"
        )
    for each, state in zip(optimizers, states, strict=True):
        each.load_state_dict(state)
    for wrapper, wrapped in pairwise(optimizers):
        # Loading gives each optimizer new param_groups, and a scheduler sets the learning rate in
        # the wrapper's alone: without this the wrapped one would keep the donor's learning rate.
        wrapped.param_groups = wrapper.param_groups
