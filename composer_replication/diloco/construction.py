"""What ``DiLoCo`` makes of its arguments before any network is touched."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from composer_replication import __version__
from composer_replication.diloco.division import Division, connect_hosts, count_shards
from composer_replication.diloco.fragments import Fragments, by_name, described_tensors
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.outer_optimizer import OuterOptimizer, check_sign, nesterov_sgd
from composer_replication.diloco.peer_rows import ROW
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.settings import TENSORS, DiLoCoSettings

log = logging.getLogger(__name__)

LOPSIDED = 2.0
"""A warning is logged if the largest fragment has more than so many times an equal share."""


def check_outer_settings(named: Iterable[str], settings: DiLoCoSettings) -> None:
    """Reject settings of the outer SGD beside an outer optimizer of the user's own.

    Args:
        named: The keywords that the caller of ``DiLoCo`` has named.
        settings: The run's settings.

    Raises:
        ValueError: There are some.
    """
    unused = [name for name in named if name.startswith("outer_")]
    if settings.changes_outer_numbers:
        unused.append("outer_lr or outer_momentum in the schedule")
    if unused:
        raise ValueError(
            f"{', '.join(unused)} and an outer_optimizer of your own: give either of them, since "
            "these are of the SGD that DiLoCo makes without one"
        )


def own_fragments(
    fragments: Fragments,
    outer_optimizer: OuterOptimizer | None,
    settings: DiLoCoSettings,
    backup_device: torch.device | str | None,
    ranks: ProcessGroup | None,
) -> list[GlobalParameters]:
    """Make the global parameters of each fragment.

    Args:
        fragments: What is synchronised.
        outer_optimizer: As for ``DiLoCo``, as the next two.
        settings: The run's settings.
        backup_device: Where global parameters and outer momentum rest between syncs.
        ranks: All ranks of this group.

    Raises:
        ValueError: The outer optimizer ascends, or there is no memory.
    """
    outer_optimizer = outer_optimizer or nesterov_sgd(*settings.outer_numbers_at(0))
    check_sign(outer_optimizer)
    tensors = by_name(fragments).values()
    are_held = any(count_shards(tensor) > 1 for tensor in tensors)
    if are_held:  # each rank holds a shard already
        ranks = ranks or torch.distributed.group.WORLD
    division_of = partial(
        Division,
        ranks=ranks,
        are_held=are_held,
        connect=cache(connect_hosts),  # once, for all fragments
    )
    try:
        return [GlobalParameters(f, outer_optimizer, backup_device, division_of) for f in fragments]
    except torch.OutOfMemoryError as error:
        count = sum(tensor.numel() for tensor in tensors)
        raise ValueError(
            "there is no memory for the global parameters and the outer momentum, 8 bytes for each "
            f"of {count:,} elements ({8 * count / 2**30:.1f} GiB): use backup_device='cpu', with "
            "which they rest in host memory, or shard the model with FSDP2"
        ) from error


LARGEST_DESCRIPTION = 1 << 17
"""Most bytes of the names and shapes of a model's tensors, as JSON, that a group sends its peers.
The lighthouse sends those of all joiners in one message, of 4 MiB at most."""


def give_settings(
    manager: DiLoCoManager,
    fragments: Fragments,
    fingerprint: Mapping[str, Any],
) -> None:
    """Give the manager what has to be equal in all groups, before it connects to them.

    Args:
        manager: Of this group.
        fragments: What is synchronised.
        fingerprint: The run's settings and the model.
    """
    tensors = by_name(fragments).values()
    names = json.dumps([[*fragment] for fragment in fragments])
    manager.settings |= {
        **fingerprint,
        # Messages have no names: the order in which a model registers its tensors counts.
        "order_of_tensors": hashlib.sha256(names.encode()).hexdigest()[:16],
        # With unequal values one group would train alone while another waits for more. Checkpoints
        # hold the fingerprint, and a resume may change this value.
        "min_replica_size": manager._min_replica_size,
        # Kinds of devices may round an outer step differently.
        "outer_step_on": min(tensor.device.type for tensor in tensors),
        "shards": max(map(count_shards, tensors)),
        "composer_replication": __version__,
        "peer_table_row": ROW,  # it may differ between builds of one version
    }
    described = described_tensors(fragments)
    if len(json.dumps(described)) <= LARGEST_DESCRIPTION:
        manager.settings[TENSORS] = described


def log_sizes(fragments: Fragments) -> None:
    """Log the largest fragment's share, and warn if it is too large.

    The largest fragment's sync takes the longest, and determines the rate that a link needs.

    Args:
        fragments: What is synchronised. All tensors have equally many bytes an element in a
            message.
    """
    sizes = [sum(tensor.numel() for tensor in fragment.values()) for fragment in fragments]
    count = len(sizes)
    share = max(sizes) / sum(sizes)
    if count > 1:
        log.info("The largest of %d fragments has %.0f %% of the bytes", count, 100 * share)
    if share * count > LOPSIDED:
        log.warning(
            "The largest of %d fragments has %.1f times the bytes of an equal share: its sync takes"
            " longer than the others, and needs more of the link. A block, an embedding or a head "
            "is never cut apart: use fewer fragments, or fragment_patterns that divide it",
            count,
            share * count,
        )
