"""Which parameters Muon trains, and which are left to AdamW."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from composer_replication.diloco.fragments import listed

log = logging.getLogger(__name__)

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
    split, found = [], []
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
            if part:
                split.append({**group, "params": part, "use_muon": use_muon})
    muon, rest = (
        sum(len(group["params"]) for group in split if group["use_muon"] == kind)
        for kind in (True, False)
    )
    if not muon:
        raise ValueError(
            f"there is no matrix of a hidden layer for Muon, and {rest} parameters for AdamW: "
            "use another optimizer, or other adamw_names"
        )
    names = listed(found) or "none"
    log.info("Muon trains %d parameters, AdamW %d; matrices among these: %s", muon, rest, names)
    return split
