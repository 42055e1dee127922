"""What DiLoCo takes beside the run's settings: what it trains, and a group's own options.

Importing this does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from composer_replication.diloco.checks import check_integer, check_seconds
from composer_replication.diloco.settings import DiLoCoSettings

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import ProcessGroup
    from torchft.manager import Manager

    from composer_replication.diloco.outer_optimizer import OuterOptimizer
    from composer_replication.diloco.torchft_api import DiLoCoManager

ON_START_TIMEOUT = ("error", "start")
"""What a cold start does when too few replica groups have come in time."""


@dataclass(frozen=True, kw_only=True)
class WaitLimit:
    """How long a replica group waits for the others.

    Args:
        give_up_after_s: How long to wait for a quorum, or for ``min_replica_size`` groups, before
            that is an error, in seconds. None: for ever; what is missing is logged.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    give_up_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.give_up_after_s is not None and not 0 < self.give_up_after_s < math.inf:
            raise ValueError(
                f"give_up_after_s={self.give_up_after_s!r}: use seconds above 0, or null"
            )


@dataclass(frozen=True, kw_only=True)
class StartPolicy:
    """How a cold start waits for the other replica groups.

    Args:
        num_replicas: How many groups a cold start waits for. A group that finds others in training
            joins these whatever their number. None: one, itself.
        start_timeout_s: How long it waits for them, in seconds.
        on_start_timeout: What it does then: ``error``, or ``start`` with those present.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    num_replicas: int | None = None
    start_timeout_s: float = 600.0
    on_start_timeout: str = ON_START_TIMEOUT[0]

    def __post_init__(self) -> None:
        if self.num_replicas is not None:
            check_integer("num_replicas", self.num_replicas, at_least=1)
        check_seconds("start_timeout_s", self.start_timeout_s)
        if self.on_start_timeout not in ON_START_TIMEOUT:
            raise ValueError(
                f"on_start_timeout={self.on_start_timeout!r}: use one of "
                f"{', '.join(ON_START_TIMEOUT)}"
            )

    @property
    def num_awaited(self) -> int:
        """How many groups a cold start waits for, this one among them."""
        return self.num_replicas or 1


@dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(StartPolicy, WaitLimit):
    """One replica group's own options of ``DiLoCo``.

    Args:
        hang_timeout_s: After how long without a completed step, sync, save or evaluation batch this
            group is taken for hung and ends, with a traceback of every thread in its log, in
            seconds. A process that is busy all the while gets five times as long, and waiting for
            other groups does not count. ``math.inf``, in YAML ``.inf``, for never. None: 1800.
        backup_device: Where global parameters and outer state live. None: in host memory.
        pin_memory: Whether they are pinned there, if there is an accelerator.
        digest_every: Every how many outer steps the groups compare digests of their global
            parameters, and a report has the ``global_digest``; 0 for never.

    Raises:
        ValueError: A value is out of range; the message has the value and the fix.
    """

    hang_timeout_s: float | None = None
    backup_device: torch.device | str | None = None
    pin_memory: bool = True
    digest_every: int = 0

    def __post_init__(self) -> None:
        WaitLimit.__post_init__(self)
        StartPolicy.__post_init__(self)
        if self.hang_timeout_s is not None and not self.hang_timeout_s > 0:
            raise ValueError(
                f"hang_timeout_s={self.hang_timeout_s!r}: use seconds above 0, or .inf for never"
            )
        check_integer("digest_every", self.digest_every, at_least=0)


@dataclass(frozen=True)
class Trained:
    """What a replica group trains, and with what.

    Args:
        manager: A torchft Manager with ``use_async_quorum=False``, see ``make_manager``.
        model_fragments: The model, or a sequence of modules with one a fragment.
        inner_optimizer: Trains the local parameters; each of its steps is counted.
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
        must_not_start: Why this group must not begin a run, for example since the run has made
            outer steps already: it then waits for a group that has the run's state. None: it may.
        ranks: All ranks of this group. Under DDP all hold the same, and each sends a share of the
            pseudo-gradient. Under FSDP2 each sends the shard that it holds, and they decide
            together whether the group's pseudo-gradient is finite. None: this rank alone, or with
            FSDP2 all ranks of the default process group.
        message_device: Where pseudo-gradients are formed and summed. None: where the model is, as
            NCCL wants it. ``cpu`` for a model on an accelerator and groups that average over gloo:
            then a sync needs no memory on the accelerator.
        also_synced: Names of parameters that are frozen now and belong to the global state, since
            they were trained when the run began.
    """

    sync_every: int = DiLoCoSettings.sync_every  # here again: the fifth by position, as in torchft
    _: KW_ONLY
    must_not_start: str | None = None
    ranks: ProcessGroup | None = None
    message_device: torch.device | str | None = None
    also_synced: Collection[str] = ()

    def __post_init__(self) -> None:
        """The settings and the options check themselves, each apart."""
