"""How large the fragments are beside each other, said at the start."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from composer_replication.diloco.fragments import split_model
from composer_replication.diloco.settings import DiLoCoSettings

log = logging.getLogger(__name__)

LOPSIDED = 2.0
"""The largest fragment is warned of if it is more than so many times an equal share."""


def log_sizes(
    model: nn.Module | Sequence[nn.Module],
    settings: DiLoCoSettings,
    fragments: Sequence[Mapping[str, Tensor]],
    also_synced: Collection[str] = (),
) -> None:
    """Log how many fragments there are and the largest one's share, and warn if it is too large.

    The largest fragment's sync takes the longest, and determines the rate that a link needs.

    Args:
        model: What was split, see ``split_model``.
        settings: The run's settings.
        fragments: The tensors of each fragment by name.
        also_synced: See ``split_model``.
    """
    count = len(fragments)
    if count == 1:
        return
    ratio = largest_ratio(fragments)
    log.info("The largest of %d fragments has %.0f %% of the bytes", count, 100 * ratio / count)
    if ratio > LOPSIDED:
        largest = max(fragments, key=_num_elements)
        log.warning(
            "The largest of %d fragments has %.1f times the bytes of an equal share; its largest "
            "parameter is %s. Its sync takes longer than the others and needs more of the link. %s",
            count,
            ratio,
            max(largest, key=lambda name: largest[name].numel()),
            _fix(model, settings, also_synced),
        )


def largest_ratio(fragments: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the size of the largest fragment, as a multiple of an equal share of all bytes.

    All tensors have equally many bytes an element in a message.
    """
    sizes = [_num_elements(fragment) for fragment in fragments]
    return max(sizes) * len(sizes) / sum(sizes)


def _num_elements(fragment: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in fragment.values())


def _fix(
    model: nn.Module | Sequence[nn.Module], settings: DiLoCoSettings, also_synced: Collection[str]
) -> str:
    if not isinstance(model, nn.Module):
        return "Give its modules as several of model_fragments, or pass fewer"
    if settings.fragment_patterns is not None:
        return (
            "Divide its patterns among several entries of fragment_patterns, or give fewer entries"
        )
    fits = next(
        count
        for count in range(settings.num_fragments - 1, 0, -1)
        if settings.sync_every % count == 0
        and largest_ratio(split_model(model, count, None, also_synced)) <= LOPSIDED
    )
    return f"A block, an embedding or a head is never cut apart: use num_fragments={fits}"
