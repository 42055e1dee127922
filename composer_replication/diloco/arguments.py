"""All arguments of DiLoCo: what it trains, the run's settings, and a group's options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from composer_replication.options import DiLoCoOptions
from composer_replication.settings import DiLoCoSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torchft.manager import Manager

    from composer_replication.diloco.outer_optimizer import OuterOptimizer
    from composer_replication.diloco.torchft_api import DiLoCoManager


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
        message_device: Where pseudo-gradients are computed and summed. None: where the model is,
            as NCCL needs it. Use ``cpu`` for a model on an accelerator and groups that average over
            gloo: a sync then needs no memory on the accelerator.
        also_synced: Names of parameters that are frozen now and belong to the global state, since
            they were trained when the run began.
    """

    sync_every: int = DiLoCoSettings.sync_every  # here again: the fifth by position, as in torchft
    _: KW_ONLY
    start_refusal: str | None = None
    ranks: ProcessGroup | None = None
    message_device: torch.device | str | None = None
    also_synced: Collection[str] = ()
