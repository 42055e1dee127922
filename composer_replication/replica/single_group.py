"""The manager of a replica group that trains alone: its quorum is itself, without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torchft.work import _DummyWork

from composer_replication.replica.ranks import do_all_ranks_agree


class SingleGroupManager:
    """Takes the place of torchft's ``Manager`` where a run has one replica group.

    It opens no socket and starts no thread and no process. It does what torchft's Manager does in a
    quorum of one: a sum over the groups is the group's own tensor, there is nobody to heal or to be
    healed by, and the counters are the same. So training, checkpoints and rounding in a quantized
    wire format are bitwise those of one group with a lighthouse.

    All ranks of the group vote on each sync, over torch.distributed's default process group: an
    error of one rank fails the sync on all. A vote waits for the other ranks at most as long as
    that process group waits for a collective.
    """

    _use_async_quorum = False
    _min_replica_size = 1

    def __init__(self) -> None:
        self._step = 0
        self._batches_committed = 0
        self._error: Exception | None = None
        self.gathers = False
        self.wants_to_gather: Callable[[], bool] = lambda: False

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Do nothing: there are no heals."""

    def start_quorum(self) -> None:
        """Begin the next sync, without the error of the last one."""
        self._error = None
        self.gathers = self.wants_to_gather()

    def current_step(self) -> int:
        """The number of committed syncs."""
        return self._step

    def num_participants(self) -> int:
        """The number of groups in the quorum, which is 1."""
        return 1

    def participating_rank(self) -> int:
        """The rank of this group in the quorum."""
        return 0

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp = ReduceOp.AVG,  # pyright: ignore[reportArgumentType]
    ) -> Any:
        """Return a Work that has ended: the tensor is its own sum and mean."""
        return _DummyWork(tensor)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Copy what this group sends into what it receives, and return a Work that has ended."""
        return _DummyWork(received.copy_(sent))

    def all_gather(self, gathered: Tensor, own: Tensor) -> Any:
        """Copy this group's tensor into the gathered one, and return a Work that has ended."""
        return _DummyWork(gathered.copy_(own))

    def errored(self) -> Exception | None:
        """The error of this rank in the current sync; None if there is none."""
        return self._error

    def report_error(self, e: Exception) -> None:
        """Record an error, so that the ranks do not commit the current sync."""
        self._error = e

    def should_commit(self) -> bool:
        """Vote with the other ranks of the group. Returns whether none of them has an error."""
        if not do_all_ranks_agree(self._error is None):
            return False
        self._step += 1
        self._batches_committed += 1
        return True

    def allow_state_dict_read(self) -> None:
        """Do nothing: nobody reads this group's state."""

    def disallow_state_dict_read(self) -> None:
        """Do nothing: nobody reads this group's state."""

    def state_dict(self) -> dict[str, int]:
        """The counters, as torchft's Manager has them."""
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the counters that ``state_dict`` returned."""
        self._step = state_dict["step"]
        self._batches_committed = state_dict["batches_committed"]

    def shutdown(self, wait: bool = True) -> None:
        """Do nothing: nothing is open."""
