"""Muon for the matrices of hidden layers and AdamW for all other parameters, in one optimizer.

It needs torch alone: copy it into your own job, whatever its trainer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

log = logging.getLogger(__name__)

A, B, C = 3.4445, -4.7750, 2.0315
"""The published coefficients of the iteration x -> A x + B x^3 + C x^5 on the singular values.

Five iterations bring those above 0.2 % of the Frobenius norm into 0.68 to 1.21.
"""
ITERATIONS = 5
SMALLEST_NORM = 1e-7

RMS_OF_ADAMW = 0.2
"""Typical root mean square of AdamW's updates, in units of the learning rate (arXiv 2502.16982)."""

ADAMW_NAMES = (
    r"(^|[._])(wte|wpe|emb|embed|embedding|embeddings|unembed)([._]|$)"
    r"|(^|[._])(head|classifier)\.weight$"
    r"|^(model\.)?output\.weight$"
)
"""Finds the names of embeddings and output layers, whose matrices AdamW trains.

Among them are those of GPT-2, MPT and BERT, of Llama in ``transformers`` and torchtitan, and of
models with a ``head`` or a ``classifier``. An output layer called ``fc`` is not found.
"""

MATRIX_DIMENSIONS = (2, 4)
"""A linear layer's weight has 2 dimensions, a convolution's 4: (out, in, height, width)."""


def orthogonalize(matrix: Tensor) -> Tensor:
    """Set all singular values of a matrix to about 1, by a Newton-Schulz iteration.

    The iteration runs in bfloat16 on accelerators, where it is known to be precise enough, and in
    fp32 on CPUs, where bfloat16 is slow.

    Args:
        matrix: Shape (rows, columns).

    Returns:
        A new matrix of the same shape and dtype.
    """
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    x = x / x.norm().clamp(min=SMALLEST_NORM)  # the iteration needs singular values of at most 1
    if x.device.type != "cpu":
        x = x.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x  # x @ x.mT is the smaller of the two products
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return (x.mT if is_tall else x).to(matrix.dtype)


def muon_update(momentum: Tensor) -> Tensor:
    """Return what Muon subtracts from a parameter, in units of the learning rate.

    Args:
        momentum: Of a matrix, or of a convolution of shape (out, in, height, width), whose matrix
            is (out, in * height * width). A DTensor is gathered, which is a collective of all ranks
            that share it; each computes the whole update and keeps its shard.
    """
    if isinstance(momentum, DTensor):
        mesh = momentum.device_mesh
        whole = [Replicate()] * mesh.ndim
        update = muon_update(momentum.full_tensor())
        update = DTensor.from_local(update, mesh, whole, run_check=False)
        return update.redistribute(placements=momentum.placements)
    matrix = momentum.flatten(1)
    return orthogonalize(matrix).mul_(RMS_OF_ADAMW * sqrt(max(matrix.shape))).reshape_as(momentum)


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of hidden layers, AdamW for all other parameters.

    Muon (https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the
    nearest orthogonal matrix, so that all directions move by the same length. Embeddings, output
    layers, norms and biases are trained by AdamW. Both are parameter groups of this one optimizer,
    since Composer takes only one, and a scheduler scales the learning rates of both.

    The update of a matrix is scaled by ``0.2 * sqrt(max(rows, columns))``, so that it is about as
    large as AdamW's (arXiv 2502.16982). ``lr`` and ``weight_decay`` are therefore those of AdamW,
    for both kinds of groups. As inner optimizer of DiLoCo: arXiv 2505.23725.

    Pass ``model.named_parameters()``: Muon gets the parameters with 2 or 4 dimensions whose names
    ``adamw_names`` does not find. Groups (dicts with ``params``) may have values of their own for
    all other arguments, and may say ``use_muon``, true or false, which then decides. llm-foundry
    passes no names, so there the ``param_groups`` of the YAML say it::

        optimizer:
          name: muon
          lr: 1.0e-3
          param_groups:
          - {param_str_match: "wte|wpe|lm_head", use_muon: false}

    Under FSDP2 each matrix is gathered at every step. FSDP1 has no matrices and is rejected.

    Args:
        params: ``model.named_parameters()``, or groups.
        lr: Learning rate.
        momentum: Muon's: the share of the old momentum that is kept.
        nesterov: Whether Muon's update looks one step ahead.
        weight_decay: Decoupled, as in ``torch.optim.AdamW``: a step multiplies by
            ``1 - lr * weight_decay``.
        betas: AdamW's.
        eps: AdamW's.
        adamw_names: Regular expression that finds the names of embeddings and output layers.

    Raises:
        ValueError: A value is impossible, no parameter is left for Muon, or there are neither names
            nor a ``use_muon``.
    """

    needs_names = True
    """From a YAML config it is given ``named_parameters()`` of the model."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_names: str = ADAMW_NAMES,
    ) -> None:
        super().__init__(
            split_groups(params, adamw_names),
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "betas": betas,
                "eps": eps,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Args:
            param_group: With ``use_muon``.

        Raises:
            ValueError: ``use_muon`` is missing, a value is impossible, or Muon would get a
                parameter that is no matrix.
        """
        if "use_muon" not in param_group:
            raise ValueError("a group of parameters lacks use_muon: set it to True or False")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay", "eps"):
            if not 0 <= group[name] < inf:
                raise ValueError(f"{name}={group[name]!r}: use a number of 0 or more")
        for name, share in (
            ("momentum", group["momentum"]),
            *(("betas", b) for b in group["betas"]),
        ):
            if not 0 <= share < 1:
                raise ValueError(f"{name}={group[name]!r}: use numbers from 0 to below 1")
        others = [tuple(p.shape) for p in group["params"] if not is_matrix(p)]
        if group["use_muon"] and others:
            raise ValueError(
                "Muon trains matrices and convolutions with 4 dimensions, and a group with "
                f"use_muon has a parameter of shape {others[0]}: set use_muon=False for it. If "
                "FSDP1 has flattened the parameters, use FSDP2 or another optimizer"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned.

        Args:
            state_dict: Of an optimizer with the same groups.

        Raises:
            ValueError: Another optimizer has saved it, or Muon trained other parameters then.
        """
        kinds = [group["use_muon"] for group in self.param_groups]
        super().load_state_dict(state_dict)  # of the groups it checks the sizes alone
        for group, use_muon in zip(self.param_groups, kinds, strict=True):
            key = "momentum_buffer" if use_muon else "exp_avg"
            states = [self.state[p] for p in group["params"] if p in self.state]
            if group.get("use_muon") != use_muon or not all(key in state for state in states):
                raise ValueError(
                    "the saved state is of another optimizer than Muon, or Muon trained other "
                    "parameters then: use the adamw_names and groups with which it was saved, or "
                    "load the weights alone"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step. Parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if group["use_muon"]:
                self._step_muon(group, trained)
            elif trained:
                self._step_adamw(group, trained)
        return loss

    def _step_muon(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        for p in trained:
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            if group["nesterov"]:
                momentum = p.grad.lerp(momentum, group["momentum"])  # type: ignore[union-attr]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(muon_update(momentum), alpha=-group["lr"])

    def _step_adamw(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        values = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        adamw = torch.optim.AdamW(trained, **values)
        adamw.state = self.state
        adamw.step()


def is_matrix(parameter: Tensor) -> bool:
    """Whether Muon can train this parameter."""
    return parameter.ndim in MATRIX_DIMENSIONS


def split_groups(params: Iterable[Any], adamw_names: str) -> list[dict[str, Any]]:
    """Split parameters into groups for Muon and groups for AdamW.

    Args:
        params: Pairs of name and parameter, or groups of them. In groups, names may be missing.
        adamw_names: Regular expression that finds the names of embeddings and output layers.

    Returns:
        Groups with ``use_muon``. Names are left out, so that checkpoints do not depend on them.

    Raises:
        ValueError: There is nothing for Muon, or names are needed and missing.
    """
    try:
        is_outer = re.compile(adamw_names).search
    except re.error as error:
        raise ValueError(f"adamw_names={adamw_names!r} is no regular expression: {error}") from None
    given = list(params)
    groups: list[Any] = given if given and isinstance(given[0], dict) else [{"params": given}]
    names_decide = not any("use_muon" in group for group in groups)
    split, found, count = [], [], {True: 0, False: 0}
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        named = [member if isinstance(member, tuple) else ("", member) for member in members]
        if names_decide and not all(name for name, _ in named):
            raise ValueError(
                "Muon cannot tell an embedding from a hidden layer without names: pass "
                "model.named_parameters(), or groups with use_muon (in llm-foundry's YAML "
                'param_groups: [{param_str_match: "wte|wpe|lm_head", use_muon: false}])'
            )
        found += [name for name, p in named if is_matrix(p) and is_outer(name)]
        hidden = {id(p) for name, p in named if is_matrix(p) and not is_outer(name)}
        for use_muon in (True, False):
            part = [p for _, p in named if group.get("use_muon", id(p) in hidden) == use_muon]
            count[use_muon] += len(part)
            if part:
                split.append({**group, "params": part, "use_muon": use_muon})
    if not count[True]:
        raise ValueError(
            f"there is no matrix of a hidden layer for Muon, and {count[False]} parameters for "
            "AdamW: use another optimizer, or other adamw_names"
        )
    names = ", ".join(found) or "none"
    log.info(
        "Muon trains %d parameters, AdamW %d; matrices among these: %s", *count.values(), names
    )
    return split
