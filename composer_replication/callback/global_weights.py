"""The global weights, for whoever evaluates or saves the model while it trains the local ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_replication.diloco.outer_optimizer import local_tensor


class GlobalWeights:
    """Puts the global parameters in the place of the local ones, in two ways.

    * ``model.state_dict()``, of the model or of any part of it, gives the global ones: so every
      saver writes them, in whatever order savers and callbacks stand, and nothing has to be undone
      afterwards (Composer has no event after a checkpoint).
    * Between ``show`` and ``hide`` the model itself holds them: for evaluators, which compute.

    Args:
        model: Without DDP around it.
        theta: The global parameters by the model's names, as this rank holds them: fp32, the shard
            of a DTensor. Looked at whenever they are needed, so they may change in place.
        is_left_alone: Whether ``state_dict`` is to give what the model holds, now.
    """

    def __init__(
        self,
        model: nn.Module,
        theta: Mapping[str, Tensor],
        is_left_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._theta = theta
        self._is_left_alone = is_left_alone
        self._live: dict[str, Tensor] = {
            name: tensor for name, tensor in _named_tensors(model) if name in theta
        }
        self._kept: dict[str, Tensor] | None = None
        names = {id(tensor): name for name, tensor in self._live.items()}
        self._hooks = []
        for module in model.modules():
            own = {
                key: names[id(tensor)]
                for key, tensor in (module._parameters | module._buffers).items()
                if id(tensor) in names  # tied ones too, under each of their names
            }
            if own:
                hook = self._hook(id(module), own)
                self._hooks.append(module.register_state_dict_post_hook(hook))

    def _hook(self, owner: int, own: Mapping[str, str]) -> Callable[..., None]:
        def substitute(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
            if id(module) != owner:
                return  # a deep copy, such as SWA's, has weights of its own
            if self._is_left_alone():
                return
            for key, name in own.items():
                found = state_dict.get(prefix + key)
                if isinstance(found, nn.Parameter) or found is None:
                    continue  # keep_vars=True asks for the model's own tensors
                state_dict[prefix + key] = self._like(found, self._theta[name])

        return substitute

    @staticmethod
    def _like(live: Tensor, theta: Tensor) -> Tensor:
        value = theta.detach().to(live.dtype)
        if isinstance(live, DTensor):
            return as_dtensor(value, live)
        return value

    def saved(self, name: str) -> Tensor:
        """What ``state_dict()`` of the model gives under a name: this rank's part of it."""
        live = self._live[name]
        return local_tensor(live if self._is_left_alone() else self._like(live, self._theta[name]))

    def local(self) -> dict[str, Tensor]:
        """The local parameters by name, also while the global ones are shown; not copies."""
        if self._kept is not None:
            return self._kept
        return {name: local_tensor(tensor) for name, tensor in self._live.items()}

    @torch.no_grad()
    def show(self) -> None:
        """Put the global parameters into the model; the local ones are kept beside ``theta``."""
        if self._kept is None:
            self._kept = {
                name: local.to(self._theta[name].device, copy=True)
                for name, local in self.local().items()
            }
            self._write(self._theta)

    @torch.no_grad()
    def hide(self) -> None:
        """Put the local parameters back, bit for bit."""
        if self._kept is not None:
            self._write(self._kept)
            self._kept = None

    def keep_shown(self) -> None:
        """What the model holds now are the local parameters."""
        self._kept = None

    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self._live.items():
            local_tensor(tensor).copy_(values[name])

    def remove(self) -> None:
        """Leave the model alone, with the local parameters in it."""
        self.hide()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def as_dtensor(shard: Tensor, like: DTensor) -> DTensor:
    """This rank's shard as part of a DTensor that lies as another one does."""
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def tied_names(model: nn.Module) -> dict[str, str]:
    """The further names of parameters that have several, and the one that we call them by."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(p)] for name, p in every if names[id(p)] != name}
