"""The part of torchft that this package uses.

``tests/replica/test_torchft_contract.py`` checks that the installed torchft has it, and the private
names that we use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.distributed import ReduceOp

HEAL_STATE = "diloco"
"""Key under which DiLoCo registers the global state with ``Manager.register_state_dict_fn``. It is
the large part of what a joiner fetches, so ``replica.heal`` also serves it before a quorum."""


class DiLoCoManager(Protocol):
    """The part of ``torchft.manager.Manager`` that DiLoCo needs.

    torchft's Manager lacks ``all_to_all`` and ``all_gather``; DiLoCo needs them where the wire
    format is not float32. They handle errors as ``allreduce`` does. Their tensors are 1-D and
    consist of as many equal parts as there are groups (``own`` is one part).
    """

    _use_async_quorum: bool
    _min_replica_size: int

    def start_quorum(self) -> None: ...
    def current_step(self) -> int: ...
    def num_participants(self) -> int: ...
    def participating_rank(self) -> int | None: ...
    def allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: ReduceOp = ...
    ) -> Any: ...
    def all_to_all(self, received: Tensor, sent: Tensor) -> Any: ...
    def all_gather(self, gathered: Tensor, own: Tensor) -> Any: ...
    def should_commit(self) -> bool: ...
    def errored(self) -> Any: ...
    def report_error(self, e: Exception) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...


class Then(NamedTuple):
    """A Work of a manager, and a step that follows it, before what else waits for this Work.

    Attributes:
        work: The Work.
        step: Called once it has ended.
    """

    work: Any
    step: Callable[[], object]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the Work, then take the step. The manager's timeout bounds the wait."""
        del timeout
        has_ended = self.work.wait()
        self.step()
        return has_ended


def fetched_state(manager: Any) -> dict[str, Any] | None:
    """Return the global state that was fetched before the first quorum; None if there is none.

    Only a ``ReplicaManager`` fetches one, and a newer one if the others have synced since. If the
    donor still has that state in the quorum, the heal gets this very object.
    """
    fetched = getattr(manager, "fetched_state", None)
    return None if fetched is None else fetched()


def ask_to_gather(manager: Any, wants: Callable[[], bool]) -> None:
    """Let the groups of a quorum gather their messages instead of summing them, if one asks for it.

    torchft's own Manager cannot: it has no reports between the groups, and no all_gather.
    """
    if hasattr(manager, "wants_to_gather"):
        manager.wants_to_gather = wants


def gathers(manager: Any) -> bool:
    """Whether a group of the last quorum wants the messages to be gathered; all groups agree."""
    return getattr(manager, "gathers", False)


def longest_wait_s(manager: Any) -> float:
    """Return how long one wait of a sync may take, in seconds: for a quorum, or for a collective.

    Unlimited with the simulated manager, whose waits have no timeouts.
    """
    limits = getattr(manager, "_quorum_timeout", None), getattr(manager, "_timeout", None)
    return sum(math.inf if limit is None else limit.total_seconds() for limit in limits)


def fault_of_last_sync(manager: Any) -> str | None:
    """Return which group made the last sync fail: ``this`` one, or ``another`` one.

    With a ``ReplicaManager`` the members report failures to each other, and the next quorum has the
    answer. None if no group can be named: torchft's own Manager, the simulated one and that of a
    group that trains alone have no such reports.
    """
    return getattr(manager, "fault", None)
