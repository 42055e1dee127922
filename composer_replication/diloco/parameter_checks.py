"""Checks that the inner optimizer trains exactly what is synchronised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from composer_replication.diloco.fragments import Parameters, listed


def check_trained_by(fragments: Sequence[Parameters], optimizer: torch.optim.Optimizer) -> None:
    """Check that the inner optimizer trains exactly what the fragments synchronise.

    A parameter outside all fragments would never be synchronised, and a fragment over copies of the
    parameters would synchronise tensors that no optimizer trains. torchft accepts both.

    Raises:
        ValueError: The parameters differ. The message names them.
    """
    trained = {
        id(parameter): f"param_groups[{group}]['params'][{index}], shape {tuple(parameter.shape)}"
        for group, contents in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(contents["params"])
        if parameter.requires_grad
    }
    synced = {
        id(p): name for fragment in fragments for name, p in fragment.items() if p.requires_grad
    }
    foreign = [name for identity, name in synced.items() if identity not in trained]
    if foreign:
        raise ValueError(
            f"in a fragment but not in the inner optimizer: {listed(foreign)}. Build the "
            "optimizer over the same model, or freeze these (requires_grad=False)"
        )
    uncovered = [where for identity, where in trained.items() if identity not in synced]
    if uncovered:
        raise ValueError(
            f"in the inner optimizer but in no fragment: {listed(uncovered)}. Add the module that "
            "holds them to model_fragments, or pass the whole model"
        )


def left_out(
    model_fragments: nn.Module | Sequence[nn.Module], fragments: Sequence[Mapping[str, Tensor]]
) -> Parameters:
    """The parameters that are in no fragment, by name."""
    whole = (
        model_fragments
        if isinstance(model_fragments, nn.Module)
        else nn.ModuleList(model_fragments)
    )
    synced = {id(parameter) for fragment in fragments for parameter in fragment.values()}
    return {name: p for name, p in whole.named_parameters() if id(p) not in synced}


def check_none_thawed(left_out: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Check that the inner optimizer still trains no parameter outside the fragments.

    Raises:
        ValueError: A parameter was frozen when the fragments were made, and is trained now: it
            would never be synchronised.
    """
    thawed = {id(p): name for name, p in left_out.items() if p.requires_grad}
    if not thawed:
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for identity, name in thawed.items() if identity in trained]
    if names:
        raise ValueError(
            f"frozen when training began, and trained now: {listed(names)}. No sync has them. "
            "Let them be trainable from the beginning, in all replica groups (their learning rate "
            "may be 0 at first), or freeze them again"
        )
