"""The state that the next fit of the same Trainer begins with; it may train other parameters."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from composer_replication.callback.checkpoint import momentum_of
from composer_replication.callback.checksums import checksums
from composer_replication.diloco.fragments import listed

log = logging.getLogger(__name__)


def replaced_since(left: Mapping[str, int] | None, live: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that have changed since the last fit, and log a warning.

    Args:
        left: The checksums at the end of that fit. None: it raised, so they are not known.
        live: The model's tensors by name.
    """
    if left is None:
        return []
    now = checksums({name: tensor for name, tensor in live.items() if name in left})
    names = [name for name, checksum in now.items() if checksum != left[name]]
    if names:
        log.warning(
            "%d tensors of the model were replaced since the last fit. Their new values are kept "
            "and become global parameters, and their outer momentum is reset. All replica groups "
            "must have the same values: %s",
            len(names),
            listed(names),
        )
    return names


def carry_over(
    ended: Mapping[str, Any], fresh: Mapping[str, Any], replaced: Collection[str]
) -> dict[str, Any]:
    """Return the state that the next fit begins with.

    Tensors that were frozen before and are trained now, and tensors that were replaced between the
    fits, begin with the model's values and without outer momentum. All groups must have the same
    values of these.

    Args:
        ended: ``DiLoCo.state_dict()`` at the end of the last fit.
        fresh: The same of the DiLoCo that has been built around the model for the next fit.
        replaced: The names of tensors that have changed since the last fit.
    """
    theta = _theta(ended)
    new = sorted(_theta(fresh).keys() - theta.keys())
    if new:
        log.info("Trained from this fit on, and synchronised: %s", listed(new))
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
            index: {"momentum_buffer": momentum[name]}
            for index, name in enumerate(own["theta"])
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
    """Return the error-feedback residual, with zeros for tensors that are new or replaced."""
    before = ended["residual"]
    return before and {
        name: before[name] if name in kept and name in before else torch.zeros_like(theta)
        for name, theta in _theta(fresh).items()
    }
