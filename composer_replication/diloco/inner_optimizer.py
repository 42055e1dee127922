"""The inner optimizer's state, also where it wraps another optimizer, as SAM's does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, the one that it wraps, and so on to the one that takes the steps.

    A wrapper's ``base_optimizer`` is what it wraps, in Composer's SAM as in most. It is in neither
    the wrapper's ``state`` nor its ``state_dict()``.
    """
    found = [optimizer]
    while isinstance(wrapped := getattr(found[-1], "base_optimizer", None), Optimizer):
        found.append(wrapped)
    return found


def clear_state(optimizer: Optimizer) -> None:
    """Forget all that it has gathered: moments, and SAM's way back from where it has climbed."""
    for each in with_wrapped(optimizer):
        each.state.clear()


def save_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its state and those of what it wraps."""
    return [each.state_dict() for each in with_wrapped(optimizer)]


def load_state(optimizer: Optimizer, states: Sequence[dict[str, Any]]) -> None:
    """Take over what ``save_state`` gave.

    Raises:
        ValueError: They are those of another kind of optimizer.
    """
    optimizers = with_wrapped(optimizer)
    if len(states) != len(optimizers):
        raise ValueError(
            f"the donor gives the states of {len(states)} inner optimizers, one around the other, "
            f"and here there are {len(optimizers)} "
            f"({' around '.join(type(each).__name__ for each in optimizers)}): use the same in all "
            "replica groups, or heal_inner_state='own'"
        )
    for each, state in zip(optimizers, states, strict=True):
        each.load_state_dict(state)
    for wrapper, wrapped in pairwise(optimizers):
        # Loading gives each new ones, and a scheduler sets the learning rate in the wrapper's.
        wrapped.param_groups = wrapper.param_groups
