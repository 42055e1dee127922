"""The arguments of DiLoCo beside the run's settings: what it trains, and a group's own options.

Importing this does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, get_args

from composer_replication.diloco.checks import check_choice, check_integer, check_seconds
from composer_replication.diloco.settings import DiLoCoSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torchft.manager import Manager

    from composer_replication.diloco.outer_optimizer import OuterOptimizer
    from composer_replication.diloco.torchft_api import DiLoCoManager

OnStartTimeout = Literal["error", "start"]
"""What a cold start does if too few replica groups are connected after ``start_timeout_s``."""


@dataclass(frozen=True, kw_only=True)
class WaitOptions:
    """For how many other replica groups a group waits, and for how long.

    Args:
        num_replicas: How many groups a cold start waits for, this one included. A group that finds
            others in training joins them, whatever their number. None: 1.
        give_up_after_s: How long to wait for a quorum, or for ``min_replica_size`` groups, before
            an error is raised, in seconds. None: without a limit. The log says what is missing.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    num_replicas: int | None = None
    give_up_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_replicas is not None:
            check_integer("num_replicas", self.num_replicas, at_least=1)
        if self.give_up_after_s is not None:
            check_seconds("give_up_after_s", self.give_up_after_s)

    @property
    def num_awaited(self) -> int:
        """How many groups a cold start waits for, this one included."""
        return self.num_replicas or 1


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(WaitOptions):
    """One replica group's own options of ``DiLoCo``.

    Args:
        start_timeout_s: How long a cold start waits for the other groups, in seconds.
        on_start_timeout: What happens after that: ``error``, or ``start`` with those connected.
        hang_timeout_s: How long this group may go without a completed step, sync, save or
            evaluation batch, in seconds. After that its process counts as hung and ends, with a
            traceback of every thread in its log. A process that is busy gets five times as long,
            and one that waits for other groups gets an hour and ``timeout`` in addition.
            ``math.inf``, in YAML ``.inf``: no limit. None: 1800.
        backup_device: Where global parameters and outer state are stored. None: in host memory.
        digest_every: Every how many outer steps the groups compare digests of their global
            parameters, and reports contain the ``global_digest``; 0: never.
        same_samples: Whether this group is meant to train on the same samples as others. If it is
            not, a warning at the first sync names the groups that do.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    start_timeout_s: float = 600.0
    on_start_timeout: OnStartTimeout = "error"
    hang_timeout_s: float | None = None
    backup_device: torch.device | str | None = None
    digest_every: int = 0
    same_samples: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("start_timeout_s", self.start_timeout_s)
        check_choice("on_start_timeout", self.on_start_timeout, get_args(OnStartTimeout))
        if self.hang_timeout_s is not None and self.hang_timeout_s != math.inf:
            check_seconds("hang_timeout_s", self.hang_timeout_s, alternative="inf for never")
        check_integer("digest_every", self.digest_every, at_least=0)


@dataclass(frozen=True)
class Trained:
    """What a replica group trains, and with what.

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
