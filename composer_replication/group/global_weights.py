"""Shows the global weights to evaluators and savers, while training uses the local ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_replication.diloco.division import held_tensor
from composer_replication.diloco.fragments import plain_name
from composer_replication.group.host import NO_AVERAGES, Averages


class GlobalWeights:
    """Puts the global parameters in the place of the local ones, in two ways.

    * ``state_dict()`` of the model, or of any module in it, returns the global parameters. Every
      saver therefore writes them, whatever the order of savers and callbacks, and nothing has to be
      undone afterwards (Composer has no event after a checkpoint).
    * Between ``show`` and ``hide`` the model itself holds them, for evaluators.

    Args:
        model: The model without its DDP wrapper.
        theta: The global parameters by the model's names, as this rank holds them: fp32, the shard
            of a DTensor. Looked up whenever they are needed, so they may change in place. Under DDP
            a look-up is a collective (``DiLoCo.global_parameters``).
        averages: The trainer's. Where they are saved, ``state_dict`` returns what the model holds.

    Attributes:
        theta: The same. Another mapping may be put here.
    """

    def __init__(
        self,
        model: nn.Module,
        theta: Mapping[str, Tensor],
        averages: Averages = NO_AVERAGES,
    ) -> None:
        self.theta = theta
        self._averages = averages
        self._live: dict[str, Tensor] = {}
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if plain_name(name) in theta:
                self._live[plain_name(name)] = tensor
        self._kept: dict[str, Tensor] = {}
        """The local parameters, while the global ones are shown."""
        names = {id(tensor): name for name, tensor in self._live.items()}
        self._hooks = ExitStack()
        for module in model.modules():
            own = {}
            for key, tensor in (module._parameters | module._buffers).items():
                if id(tensor) in names:  # tied ones too, under each of their names
                    own[key] = names[id(tensor)]
            if own:
                hook = self._hook(id(module), own)
                self._hooks.callback(module.register_state_dict_post_hook(hook).remove)

    def _hook(self, owner: int, own: Mapping[str, str]) -> Callable[..., None]:
        def substitute(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            if id(module) != owner:
                return  # a deep copy, such as an average, has weights of its own
            if self._averages.are_saved or self._kept:
                return  # while they are shown, one rank of DDP may save without the others
            for key, name in own.items():
                local = state_dict.get(prefix + key)
                if local is None or isinstance(local, nn.Parameter):
                    continue  # keep_vars=True asks for the model's own tensors
                value = self.theta[name].detach().to(local.dtype)
                if isinstance(local, DTensor):
                    value = as_dtensor(value, local)
                state_dict[prefix + key] = value

        return substitute

    def saved(self, name: str) -> Tensor:
        """Return this rank's part of what ``state_dict()`` of the model has under a name."""
        live = self._live[name]
        if self._averages.are_saved:
            return held_tensor(live)
        return self.theta[name].detach().to(live.dtype)

    def local(self) -> dict[str, Tensor]:
        """The local parameters by name, also while the global ones are shown; not copies."""
        if self._kept:
            return self._kept
        return {name: held_tensor(tensor) for name, tensor in self._live.items()}

    @torch.no_grad()
    def show(self) -> None:
        """Put the global parameters into the model; the local ones are kept beside ``theta``."""
        if self._kept:
            return
        try:
            for name, tensor in self._live.items():
                theta = self.theta[name]
                local = held_tensor(tensor)
                self._kept[name] = local.to(theta.device, copy=True)
                local.copy_(theta)
        except BaseException:  # such as too little memory
            self.hide()
            raise

    @torch.no_grad()
    def hide(self) -> None:
        """Put the local parameters back, bitwise identical."""
        for name, local in self._kept.items():
            held_tensor(self._live[name]).copy_(local)
        self._kept = {}

    def remove(self) -> None:
        """Put the local parameters back, and remove the hooks."""
        self.hide()
        self._hooks.close()


class Generators:
    """Keeps the states of the random generators. Both methods may be repeated."""

    def __init__(self) -> None:
        self._restores: list[Callable[[], object]] = []

    def save(self) -> None:
        """Save the states, unless they have been saved already."""
        if self._restores:
            return
        self._restores = [
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]
        if torch.cuda.is_initialized():
            self._restores.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    def restore(self) -> None:
        """Restore the saved states, if there are any."""
        for restore in self._restores:
            restore()
        self._restores = []


def as_dtensor(shard: Tensor, like: DTensor) -> DTensor:
    """Return this rank's shard as part of a DTensor that is sharded like another one."""
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
    )
