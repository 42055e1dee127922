"""The part of torchft that this package uses.

``tests/replica/test_torchft_contract.py`` checks that the installed torchft has it, and the private
names that we use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.distributed import ReduceOp

HEAL_STATE = "diloco"
"""Key under which DiLoCo registers the global state with ``Manager.register_state_dict_fn``. It is
the large part of what a joiner fetches, so ``replica.heal`` also serves it before a quorum."""

STATE_NAME = "sha256"
"""Key under which a global state that was downloaded has its name, the SHA-256 of its bytes. What a
joiner has prepared for a state serves for every state of the same name."""


class DiLoCoManager(Protocol):
    """What DiLoCo needs of a manager: a part of torchft's ``Manager``, and what that lacks.

    ``all_to_all`` and ``all_gather`` handle errors as ``allreduce`` does. Their tensors are 1-D and
    consist of as many equal parts as there are groups (``own`` is one part).

    Attributes:
        num_replicas: How many groups the start of a run waits for, an argument of ``make_manager``;
            None if it was not given.
        settings: What has to be equal in all groups, compared before they connect.
        asks_to_gather: Whether this group asks, in its next quorum, that messages are gathered, and
            not summed.
    """

    _min_replica_size: int
    num_replicas: int | None
    settings: dict[str, Any]
    asks_to_gather: bool

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
    def report_error(self, e: Any) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state_dict: dict[str, int]) -> None: ...

    @property
    def members(self) -> tuple[str, ...]:
        """``<replica_id>:<uuid>`` of the groups in the last quorum; empty if there are no names."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether a group of the last quorum asks that messages are gathered; all groups agree."""
        ...

    @property
    def fault(self) -> str | None:
        """Which group made the last sync fail: ``this``, ``another``, or None if nobody knows."""
        ...

    @property
    def longest_wait_s(self) -> float:
        """How long one wait of a sync may take, in seconds: for a quorum, or for a collective."""
        ...

    def fetched_state(self) -> dict[str, Any] | None:
        """The global state that was fetched before the first quorum; None if there is none.

        It is a newer one if the others have synced since. ``STATE_NAME`` is in it.
        """
        ...

    def serve_state(self, source: Any) -> None:
        """Serve the global state outside of quorums too, so that joiners can fetch it."""
        ...

    def on_other_datasets(self) -> list[str]:
        """The groups of the last quorum that divide other datasets, and this one; empty: none."""
        ...


def check_manager(manager: Any) -> None:
    """Check that a manager has what ``DiLoCo`` needs.

    Raises:
        ValueError: It is torchft's own, whose groups send each other no reports.
    """
    if not hasattr(manager, "all_gather"):
        raise ValueError(
            f"{type(manager).__name__} cannot compare settings, name a group at fault or check "
            "what arrives: build the manager with composer_replication.make_manager"
        )


class Then(NamedTuple):
    """A Work of a manager, and a step that follows it, before what else waits for this Work.

    Attributes:
        work: The Work.
        step: Called once it has ended.
    """

    work: Any
    step: Callable[[], object]

    def wait(self) -> None:
        """Wait for the Work, then take the step. The manager's timeout bounds the wait."""
        self.work.wait()
        self.step()
