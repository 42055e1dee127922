"""All arguments of DiLoCo, and what is made of them: the run's settings, and global parameters."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchft.manager import Manager

from composer_replication.arguments import pick
from composer_replication.diloco.averaging.quantized_mean import check_can_quantize
from composer_replication.diloco.fragments import (
    check_trained_by,
    described_tensors,
    synced_tensors,
)
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.outer_optimizer import OuterOptimizer, check_sign, nesterov_sgd
from composer_replication.diloco.peer_table import ROW
from composer_replication.diloco.shards import Shards, connect_hosts, count_shards
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.options import DiLoCoOptions
from composer_replication.settings import OUTER_LR, OUTER_MOMENTUM, TENSORS, DiLoCoSettings

log = logging.getLogger(__name__)

LOPSIDED = 2.0
"""A warning is logged if the largest fragment has more than so many times an equal share."""


@dataclass(frozen=True)
class Trained:
    """The model of a replica group, its optimizers and its manager.

    Args:
        manager: A torchft Manager with ``use_async_quorum=False``, see ``make_manager``.
        model_fragments: The model, or a sequence of modules with one per fragment.
        inner_optimizer: Trains the local parameters. Each of its steps is counted.
        outer_optimizer: Takes a fragment's global parameters (fp32) and returns the
            ``torch.optim.Optimizer`` that moves them. None: SGD with ``outer_lr``,
            ``outer_momentum`` and ``outer_nesterov``.
    """

    manager: DiLoCoManager | Manager
    model_fragments: nn.Module | Sequence[nn.Module]
    inner_optimizer: torch.optim.Optimizer
    outer_optimizer: OuterOptimizer | None = None


@dataclass(frozen=True)
class DiLoCoArguments(DiLoCoOptions, DiLoCoSettings, Trained):
    """All arguments of ``DiLoCo``: these, the run's settings and the group's options.

    Args:
        start_refusal: The reason why this group must not begin the run, for example because the run
            has made outer steps already. The group then waits for one that has the run's state.
            None: it may begin the run.
        ranks: All ranks of this group. Under DDP all hold the same model, and each sends a share of
            the pseudo-gradient. With an outer SGD, each holds and steps only that share of the
            global parameters; any other outer optimizer gets whole tensors on every rank. Under
            FSDP2 each sends the shard that it holds, and they decide together whether the group's
            pseudo-gradient is finite. None: this rank alone, or with FSDP2 all ranks of the
            default process group.
        also_synced: Names of parameters that are frozen now and belong to the global state, since
            they were trained when the run began.
    """

    sync_every: int = DiLoCoSettings.sync_every  # here again: the fifth by position, as in torchft
    _: KW_ONLY
    start_refusal: str | None = None
    ranks: ProcessGroup | None = None
    also_synced: Collection[str] = ()


def settings_of(arguments: DiLoCoArguments, given: Collection[str]) -> DiLoCoSettings:
    """Return the run's settings.

    Args:
        arguments: All arguments of ``DiLoCo``.
        given: The names of the arguments that the caller gave; the others have their defaults.

    Raises:
        ValueError: A setting is out of range, or belongs to an outer SGD that is not used.
    """
    model = arguments.model_fragments
    count = {} if isinstance(model, nn.Module) or not model else {"num_fragments": len(model)}
    has_own = arguments.outer_optimizer is not None
    # Its numbers are its own from the first outer step on.
    numbers = {"outer_lr": OUTER_LR, "outer_momentum": OUTER_MOMENTUM} if has_own else {}
    settings = pick(DiLoCoSettings, vars(arguments) | count | numbers)
    unused = [name for name in given if name.startswith("outer_") and name != "outer_optimizer"]
    if settings.changes_outer_numbers:
        unused.append("outer_lr or outer_momentum in the schedule")
    if has_own and unused:
        raise ValueError(
            f"{', '.join(unused)} and an outer_optimizer of your own: give either of them, since "
            "these are of the SGD that DiLoCo makes without one"
        )
    if settings.overlap_warning:
        warnings.warn(settings.overlap_warning, stacklevel=4)
    return settings


def own_model(arguments: DiLoCoArguments, settings: DiLoCoSettings) -> list[GlobalParameters]:
    """Split the model into fragments, and make global parameters of each.

    Args:
        arguments: All arguments of ``DiLoCo``.
        settings: The run's settings.

    Raises:
        ValueError: The fragments and the inner optimizer hold different parameters, the outer
            optimizer ascends, or the manager cannot send the wire format.
    """
    check_can_quantize(arguments.manager, settings.wire_format)
    outer_optimizer = arguments.outer_optimizer or nesterov_sgd(*settings.outer_numbers_at(0))
    check_sign(outer_optimizer)
    fragments = synced_tensors(arguments.model_fragments, settings, arguments.also_synced)
    check_trained_by(fragments, arguments.inner_optimizer)
    log_sizes(fragments)
    ranks = arguments.ranks
    are_held = any(count_shards(t) > 1 for tensors in fragments for t in tensors.values())
    if are_held:  # each rank holds a shard already
        ranks = ranks or torch.distributed.group.WORLD
    shards_of = partial(
        Shards,
        ranks=ranks,
        are_held=are_held,
        host_ranks=None if ranks is None or are_held else cache(partial(connect_hosts, ranks)),
    )
    asked = arguments.backup_device
    backup_device = None if asked is None else torch.device(asked)
    try:
        return [GlobalParameters(f, outer_optimizer, backup_device, shards_of) for f in fragments]
    except torch.OutOfMemoryError as error:
        count = sum(tensor.numel() for tensors in fragments for tensor in tensors.values())
        raise ValueError(
            "there is no memory for the global parameters and the outer momentum, 8 bytes for each "
            f"of {count:,} elements ({8 * count / 2**30:.1f} GiB): use backup_device='cpu', with "
            "which they rest in host memory, or shard the model with FSDP2"
        ) from error


LARGEST_DESCRIPTION = 1 << 17
"""Most bytes of the names and shapes of a model's tensors, as JSON, that a group sends its peers.
The lighthouse sends those of all joiners in one message, of 4 MiB at most."""


def tell_settings(
    manager: Any, synced: Sequence[Mapping[str, Tensor]], fingerprint: Mapping[str, Any]
) -> None:
    """Give the manager what has to be equal in all groups, before it connects to them.

    Args:
        manager: Of this group. torchft's own compares nothing.
        synced: The synchronised tensors by name, of each fragment.
        fingerprint: The run's settings and the model.
    """
    if not hasattr(manager, "settings"):
        return
    manager.settings |= {
        **fingerprint,
        # With unequal values one group would train alone while another waits for more. Checkpoints
        # hold the fingerprint, and a resume may change this value.
        "min_replica_size": manager._min_replica_size,
        # Kinds of devices may round an outer step differently.
        "outer_step_on": min(tensor.device.type for each in synced for tensor in each.values()),
        "shards": max(count_shards(tensor) for each in synced for tensor in each.values()),
        "peer_table_row": ROW,  # it differs in another version of this package
    }
    if len(json.dumps(tensors := described_tensors(synced))) <= LARGEST_DESCRIPTION:
        manager.settings[TENSORS] = tensors


def log_sizes(fragments: Sequence[Mapping[str, Tensor]]) -> None:
    """Log the largest fragment's share, and warn if it is too large.

    The largest fragment's sync takes the longest, and determines the rate that a link needs.

    Args:
        fragments: The tensors of each fragment by name. All of them have equally many bytes an
            element in a message.
    """
    sizes = [sum(tensor.numel() for tensor in fragment.values()) for fragment in fragments]
    count, share = len(sizes), max(sizes) / sum(sizes)
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
