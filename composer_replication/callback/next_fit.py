"""What one fit of a process leaves to the next one, which may train other parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from composer_replication.callback.checkpoint import momentum_of
from composer_replication.callback.checksums import checksums

log = logging.getLogger(__name__)


def replaced_since(left: Mapping[str, int] | None, live: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that have other values than a fit has left, with a warning.

    Args:
        left: The checksums of what it has left. None: it raised, and nobody knows.
        live: The model's tensors by name.
    """
    if left is None:
        return []
    now = checksums({name: tensor for name, tensor in live.items() if name in left})
    names = [name for name, found in now.items() if found != left[name]]
    if names:
        log.warning(
            "%d tensors of the model were replaced since the last fit. They stay as they are, are "
            "this group's part of the global model too, and their outer momentum begins anew. All "
            "replica groups must have them equal: %s",
            len(names),
            ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""),
        )
    return names


def carry_over(
    ended: Mapping[str, Any], fresh: Mapping[str, Any], replaced: Collection[str]
) -> dict[str, Any]:
    """The state that the next fit begins with.

    What was frozen before and is trained now, and what was replaced in the model between the fits,
    begins as it is in the model, without outer momentum. All groups must have it equal.

    Args:
        ended: ``DiLoCo.state_dict()`` of the fit before.
        fresh: The same of the DiLoCo that goes on, as it has been built around the model.
        replaced: The names of tensors that the model holds other values of than that fit has left.
    """
    theta = _theta(ended)
    new = sorted(_theta(fresh).keys() - theta.keys())
    if new:
        log.info("Trained from this fit on, and synchronised: %s", ", ".join(new))
    if not new and not replaced:
        return dict(ended)
    kept = {name: tensor for name, tensor in theta.items() if name not in replaced}
    in_flight = ended["in_flight"]
    is_same = not new and (not in_flight or in_flight["local"].keys().isdisjoint(replaced))
    return {
        **ended,
        "fragments": _fragments(ended, fresh, kept),
        "residual": _residual(ended, fresh, kept),
        "in_flight": in_flight if is_same else None,
        "settings": {**ended["settings"], "model": fresh["settings"]["model"]},
    }


def _theta(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: t for fragment in state["fragments"] for name, t in fragment["theta"].items()}


def _fragments(
    ended: Mapping[str, Any], fresh: Mapping[str, Any], kept: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    momentum = momentum_of(ended["fragments"])
    frozen = {name for fragment in ended["fragments"] for name in fragment["frozen"]}
    has_momentum = any(fragment["optimizer"]["state"] for fragment in ended["fragments"])
    fragments = []
    for own, before in zip(fresh["fragments"], ended["fragments"], strict=True):
        state = {
            place: {"momentum_buffer": momentum[name]}
            for place, name in enumerate(own["theta"])
            if has_momentum and name in momentum and name in kept
        }
        (group,), (own_group,) = (f["optimizer"]["param_groups"] for f in (before, own))
        groups = [{**group, "params": own_group["params"]}]
        fragments.append(
            {
                "theta": {name: kept.get(name, t) for name, t in own["theta"].items()},
                "optimizer": {"state": state, "param_groups": groups},
                "frozen": [name for name in own["theta"] if name in frozen],
            }
        )
    return fragments


def _residual(
    ended: Mapping[str, Any], fresh: Mapping[str, Any], kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """What the wire format has kept back; nothing of what begins anew."""
    before = ended["residual"]
    return before and {
        name: before[name] if name in kept and name in before else torch.zeros_like(theta)
        for name, theta in _theta(fresh).items()
    }
