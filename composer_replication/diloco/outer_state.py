"""The outer state of a fragment in plain containers: for a joiner, and for a checkpoint.

The state of a rank has this rank's share of the tensors. A checkpoint has all of them, so that the
number of ranks may change until a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from composer_replication.diloco.global_parameters import GlobalParameters, copy_into


def outer_state(globals_: GlobalParameters, *, copies: bool = True) -> dict[str, Any]:
    """The global tensors by name, and the outer optimizer's state: of the share, if any.

    Args:
        globals_: Of one fragment.
        copies: Whether of the tensors, or the tensors themselves.
    """
    state = {"theta": globals_.tensors, "optimizer": globals_.optimizer.state_dict()}
    take = Tensor.clone if copies else Tensor.detach
    with torch.no_grad():
        return tree_map_only(Tensor, take, state)


@dataclass(frozen=True)
class Staged:
    """What another group sent of a fragment, in memory that can become the fragment's own.

    A joiner copies it there before the quorum in which all groups wait for its heal.

    Attributes:
        state: What ``outer_state`` gave there, with the tensors of this memory.
        flat: That of the global parameters; see ``GlobalParameters.flat``.
        momentum: That of the outer momentum, like ``flat``; None if there is none.
    """

    state: Mapping[str, Any]
    flat: Tensor
    momentum: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(cls, globals_: GlobalParameters, state: Mapping[str, Any]) -> Staged:
        """Copy a state.

        Raises:
            ValueError: A tensor is missing or has another shape or dtype.
        """
        _check(state, globals_.tensors)
        flat = torch.empty_like(globals_.flat, pin_memory=globals_.flat.is_pinned())
        views = zip(globals_.theta, globals_.views(flat), strict=True)
        theta = {name: view.copy_(state["theta"][name]) for name, view in views}
        theta |= {name: state["theta"][name] for name in globals_.copied.values}
        optimizer, momentum = state["optimizer"], None
        if any("momentum_buffer" in own for own in optimizer["state"].values()):
            momentum = torch.empty_like(flat, pin_memory=False)
            buffers = globals_.views(momentum)
            own_state = {
                index: {
                    key: buffers[index].copy_(value) if key == "momentum_buffer" else value
                    for key, value in own.items()
                }
                for index, own in optimizer["state"].items()
            }
            optimizer = {**optimizer, "state": own_state}
        return cls({**state, "theta": theta, "optimizer": optimizer}, flat, momentum)

    def become_own(self, globals_: GlobalParameters) -> None:
        """Have the fragment continue in this memory, from this state."""
        globals_.move_to(self.flat, self.momentum)
        load_outer_state(globals_, self.state)


@torch.no_grad()
def load_outer_state(
    globals_: GlobalParameters, state: Mapping[str, Any], *, keeps_hyperparameters: bool = False
) -> None:
    """Take over what ``outer_state`` gave, here or in another group.

    Args:
        globals_: Of the same fragment.
        state: What it gave.
        keeps_hyperparameters: Keep this optimizer's own learning rate, momentum, ...

    Raises:
        ValueError: A tensor is missing or has another shape or dtype; nothing has changed then.
    """
    _check(state, globals_.tensors)
    for name, tensor in globals_.tensors.items():
        copy_into(tensor, state["theta"][name])
    optimizer = globals_.optimizer
    theirs = optimizer.state_dict() if keeps_hyperparameters else state["optimizer"]
    optimizer.load_state_dict(
        {"state": state["optimizer"]["state"], "param_groups": theirs["param_groups"]}
    )
    globals_.keep_own_state()


def gather(globals_: GlobalParameters, state: dict[str, Any]) -> dict[str, Any]:
    """What ``outer_state`` gives without copies, of all shares. A collective, if there are."""
    return _each_tensor(globals_, state, globals_.whole)


def cut(globals_: GlobalParameters, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's share of what ``gather`` gave, on whatever number of ranks.

    Raises:
        ValueError: A tensor is missing or has another shape or dtype.
    """
    index = {name: position for position, name in enumerate(globals_.theta)}
    if globals_.is_shared:
        whole = {name: torch.empty(s, device="meta") for name, s in globals_.shapes.items()}
        _check(state, whole | globals_.copied.values)
    return _each_tensor(globals_, state, lambda n, t: globals_.share.part_of(index[n], t))


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
