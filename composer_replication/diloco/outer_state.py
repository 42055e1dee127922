"""The outer state of a fragment in plain containers: for a joiner, and for a checkpoint.

The state of a rank has this rank's share of the tensors. A checkpoint has all of them, so that the
number of ranks may change until a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from composer_replication.diloco.global_parameters import GlobalParameters


def outer_state(globals_: GlobalParameters, *, copies: bool = True) -> dict[str, Any]:
    """The global tensors by name, and the outer optimizer's state; with shares, of this rank's.

    Args:
        globals_: The global parameters of one fragment.
        copies: Whether to copy the tensors.
    """
    state = {"theta": globals_.tensors, "optimizer": globals_.optimizer.state_dict()}
    take = Tensor.clone if copies else Tensor.detach
    with torch.no_grad():
        return tree_map_only(Tensor, take, state)


class Staged(NamedTuple):
    """A fragment's state from another group, in memory that the fragment can continue in.

    A joiner copies it there before the quorum in which all groups wait for its heal.

    Attributes:
        flat: Of the global parameters, like ``GlobalParameters.flat``.
        momentum: That of the outer momentum, like ``flat``.
    """

    flat: Tensor
    momentum: Tensor


def stage(globals_: GlobalParameters, state: Mapping[str, Any]) -> Staged:
    """Copy what ``outer_state`` returned in another group.

    Raises:
        ValueError: A tensor is missing or has another shape or dtype.
    """
    _check(state, globals_.tensors)
    flat = torch.empty_like(globals_.flat, pin_memory=globals_.flat.is_pinned())
    momentum = torch.empty_like(flat, pin_memory=False)
    _copy(state, globals_, globals_.views(flat), globals_.views(momentum))
    return Staged(flat, momentum)


def load_outer_state(
    globals_: GlobalParameters,
    state: Mapping[str, Any],
    staged: Staged | None = None,
    *,
    keeps_hyperparameters: bool = False,
) -> None:
    """Take over what ``outer_state`` returned, here or in another group.

    Args:
        globals_: The global parameters of the same fragment.
        state: What ``outer_state`` returned.
        staged: What ``stage`` has made of it. The fragment continues in its memory.
        keeps_hyperparameters: Keep this optimizer's own learning rate, momentum, ...

    Raises:
        ValueError: A tensor is missing or has another shape or dtype; nothing has changed then.
    """
    _check(state, globals_.tensors)
    if staged is None:
        _copy(state, globals_, globals_.theta.values(), globals_.momenta)
    else:
        globals_.move_to(*staged)
    for name, value in globals_.copied.values.items():
        value.copy_(state["theta"][name])
    theirs = globals_.optimizer.state_dict() if keeps_hyperparameters else state["optimizer"]
    globals_.load_optimizer(
        {"state": state["optimizer"]["state"], "param_groups": theirs["param_groups"]}
    )


@torch.no_grad()
def _copy(
    state: Mapping[str, Any],
    globals_: GlobalParameters,
    theta: Iterable[Tensor],
    momenta: Sequence[Tensor],
) -> None:
    for name, own in zip(globals_.theta, theta, strict=True):
        own.copy_(state["theta"][name])
    for index, values in state["optimizer"]["state"].items():
        if values.get("momentum_buffer") is not None:
            momenta[index].copy_(values["momentum_buffer"])


def gather(globals_: GlobalParameters, state: dict[str, Any]) -> dict[str, Any]:
    """``outer_state`` of all shares, without copies. With shares it is a collective."""
    return _each_tensor(globals_, state, globals_.whole)


def cut(globals_: GlobalParameters, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of what ``gather`` returned, on any number of ranks.

    Raises:
        ValueError: A tensor is missing or has another shape or dtype.
    """
    index = {name: position for position, name in enumerate(globals_.theta)}
    if globals_.is_shared:
        whole = {name: torch.empty(s, device="meta") for name, s in globals_.shapes.items()}
        _check(state, whole | globals_.copied.values)
    return _each_tensor(globals_, state, lambda n, t: globals_.shards.part_of(index[n], t))


def _each_tensor(
    globals_: GlobalParameters, state: dict[str, Any], change: Callable[[str, Tensor], Tensor]
) -> dict[str, Any]:
    if not globals_.is_shared:
        return state
    names, optimizer = list(globals_.theta), state["optimizer"]
    momentum = {
        index: {k: change(names[index], v) if isinstance(v, Tensor) else v for k, v in own.items()}
        for index, own in optimizer["state"].items()
    }
    theta = {n: change(n, t) if n in globals_.theta else t for n, t in state["theta"].items()}
    return state | {"theta": theta, "optimizer": optimizer | {"state": momentum}}


def _check(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        received = state["theta"].get(name)
        if received is None or (received.shape, received.dtype) != (tensor.shape, tensor.dtype):
            what = (
                "is missing" if received is None else f"is {received.dtype} {tuple(received.shape)}"
            )
            raise ValueError(
                f"global parameter {name} of a saved or received state {what}, and here it is "
                f"{tensor.dtype} {tuple(tensor.shape)}: it is another model's state, or has "
                "other fragments"
            )
