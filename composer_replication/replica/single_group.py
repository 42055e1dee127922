"""The manager of a group that trains alone: it opens no socket, and starts no thread or process.

It imports nothing else of replica/ but the ranks: the simulation's manager is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.torchft_api import TellsNothing
from composer_replication.replica.ranks import gather


class Collective(NamedTuple):
    """Replaces the Work that a Manager's collectives return.

    Attributes:
        wait: Waits for all members, then writes the result into its tensor. Returns whether the
            collective succeeded. An error is reported to the manager, as in torchft.
    """

    wait: Callable[[], bool]


class SingleGroupManager(TellsNothing):
    """Takes the place of torchft's ``Manager`` where a run has one replica group.

    A sum over the groups is the group's own tensor, there is nobody to heal or to be healed by, and
    the counters are those of torchft. So training, checkpoints and rounding in a quantized wire
    format are bitwise those of one group with a lighthouse.

    All ranks of the group vote on each sync, over torch.distributed's default process group: an
    error of one rank fails the sync on all. A vote waits for the other ranks at most as long as
    that process group waits for a collective.
    """

    members: tuple[str, ...] = ()
    """No groups, so that no log line names them: one says already that this one is alone."""

    fault = None
    """Nobody says which group made the last sync fail."""

    longest_wait_s = math.inf
    """How long one wait of a sync may take, in seconds. No other group is waited for here, and the
    collectives of the simulation have no timeout."""

    _use_async_quorum = False
    _min_replica_size = 1

    def __init__(self) -> None:
        self._step = 0
        self._batches_committed = 0
        self._has_quorum = False
        self._error: Exception | None = None
        self._state_dict_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self.num_replicas: int | None = 1
        self.give_up_after_s: float | None = None
        self.asks_to_gather = False
        """Whether this group asks that messages are gathered, and not summed."""
        self.settings: dict[str, Any] = {}
        """All that has to be equal in all groups; DiLoCo sets it."""

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
    ) -> None:
        """Register a part of the state that a heal transfers.

        Args:
            key: Name of the part.
            load_state_dict: Loads the part from a donor's state.
            state_dict: Returns the part.

        Raises:
            ValueError: The key is registered already.
        """
        if key in self._state_dict_fns:
            raise ValueError(f"state dict key {key!r} is registered already")
        self._state_dict_fns[key] = (load_state_dict, state_dict)

    # ---- the quorum ------------------------------------------------------------------------------

    def start_quorum(self) -> None:
        """Begin a sync, with this group alone."""
        self._has_quorum = True
        self._error = None

    def current_step(self) -> int:
        """The number of committed syncs."""
        return self._step

    def num_participants(self) -> int:
        """The number of members of the quorum; 0 before the first one."""
        return int(self._has_quorum)

    @property
    def gathers(self) -> bool:
        """Whether a member of the quorum asks that messages are gathered."""
        return self.asks_to_gather  # DiLoCo sets it between two quorums

    def participating_rank(self) -> int | None:
        """The rank of this group in the quorum; None before the first one."""
        return 0 if self._has_quorum else None

    # ---- collectives: the result is what this group has sent ------------------------------------

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: Any = ReduceOp.AVG,
    ) -> Collective:
        """Start to replace a tensor by its sum or mean over the groups, which it is already.

        Raises:
            ValueError: ``should_quantize`` is True, or the operation is another one.
        """
        del tensor
        self._check_operation(should_quantize, reduce_op)
        return Collective(self._is_sound)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Collective:
        """Start to exchange chunks: the one that this group receives is all that it has sent."""
        return self._copy(received, sent)

    def all_gather(self, gathered: Tensor, own: Tensor) -> Collective:
        """Start to concatenate the tensors of all members."""
        return self._copy(gathered, own)

    def _check_operation(self, should_quantize: bool, reduce_op: Any) -> None:
        if should_quantize:
            raise ValueError(
                f"should_quantize=True: {type(self).__name__} cannot quantize. Use a wire_format "
                "of DiLoCo instead"
            )
        if reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ValueError(
                f"reduce_op={reduce_op}: {type(self).__name__} cannot compute it. Use SUM or AVG"
            )

    @torch.no_grad()
    def _copy(self, result: Tensor, sent: Tensor) -> Collective:
        result.copy_(sent)
        return Collective(self._is_sound)

    def _is_sound(self) -> bool:
        return self._error is None

    # ---- the vote --------------------------------------------------------------------------------

    def errored(self) -> Exception | None:
        """The error of this quorum; None if there is none."""
        return self._error

    def report_error(self, e: Exception) -> None:
        """Record an error, so that this group votes against the commit."""
        self._error = e

    def should_commit(self) -> bool:
        """Vote with the other ranks of the group. Returns whether none of them has an error."""
        assert self._has_quorum, "a vote before start_quorum"
        is_committed = all(gather(self._error is None))
        if is_committed:
            self._step += 1
            self._batches_committed += 1
        return is_committed

    # ---- the state -------------------------------------------------------------------------------

    def allow_state_dict_read(self) -> None:
        """Do nothing, for torchft's own DiLoCo: nobody reads the state while it changes."""

    def disallow_state_dict_read(self) -> None:
        """Do nothing, for the reason given at ``allow_state_dict_read``."""

    def state_dict(self) -> dict[str, int]:
        """The step counters, for a checkpoint."""
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the step counters from a checkpoint."""
        self._step = state_dict["step"]
        self._batches_committed = state_dict["batches_committed"]

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: nobody waits for this group."""
        del wait
