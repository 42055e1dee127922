"""The part of torchft that this package uses.

``tests/replica/test_torchft_contract.py`` checks that the installed torchft has it, and the private
names that we use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor
from torch.distributed import ReduceOp

HEAL_STATE = "diloco"
"""Key under which DiLoCo registers the global state with ``Manager.register_state_dict_fn``. It is
the large part of what a joiner fetches, so ``replica.heal`` also serves it before a quorum."""

STATE_NAME = "sha256"
"""Key under which a global state that was downloaded has its name, a hash over its bytes. Equal
states have the same name in all groups: what a joiner has prepared for one serves for another."""


class DiLoCoManager(Protocol):
    """What DiLoCo needs of a manager: a part of torchft's ``Manager``, and what that lacks.

    ``all_to_all`` and ``all_gather`` handle errors as ``allreduce`` does. Their tensors are 1-D and
    consist of as many equal parts as there are groups (``own`` is one part).

    Attributes:
        num_replicas: How many groups the start of a run waits for, an argument of ``make_manager``;
            None if it was not given.
        give_up_after_s: The same of how long to wait for enough groups, in seconds.
        settings: What has to be equal in all groups, compared before they connect.
        asks_to_gather: Whether this group asks, in its next quorum, that messages are gathered, and
            not summed.
    """

    _use_async_quorum: bool
    _min_replica_size: int
    num_replicas: int | None
    give_up_after_s: float | None
    settings: dict[str, Any]
    asks_to_gather: bool

    def start_quorum(self) -> None: ...
    def current_step(self) -> int: ...
    def num_participants(self) -> int: ...
    def participating_rank(self) -> int | None: ...
    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp = ...,
    ) -> Any: ...
    def all_to_all(self, received: Tensor, sent: Tensor) -> Any: ...
    def all_gather(self, gathered: Tensor, own: Tensor) -> Any: ...
    def should_commit(self) -> bool: ...
    def errored(self) -> Any: ...
    def report_error(self, e: Any) -> None: ...
    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None],
        state_dict: Callable[[], Any],
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
        """How long one request for a quorum, or one collective, may take, in seconds."""
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

    def watch_waits(self, note_progress: Callable[[], object]) -> None:
        """Call this at least every ``longest_wait_s`` seconds while others are waited for."""
        ...


class TellsNothing:
    """The part of a ``DiLoCoManager`` whose groups tell each other nothing beside a sync."""

    def watch_waits(self, note_progress: Callable[[], object]) -> None:
        """Do nothing: no wait for a quorum is longer than ``longest_wait_s``."""

    def fetched_state(self) -> None:
        """No state: nobody downloads one before a quorum."""

    def serve_state(self, source: Any) -> None:
        """Do nothing: joiners get the state from torchft, in their quorum alone."""

    def on_other_datasets(self) -> list[str]:
        """No groups: they do not know what the others divide."""
        return []


class StockManager(TellsNothing):
    """Makes torchft's own Manager a ``DiLoCoManager``.

    Its groups send each other no reports. So nobody compares settings, names a group at fault,
    gathers messages, or fetches the state before the quorum.

    Args:
        stock: torchft's Manager. What this class does not have is the stock manager's.
    """

    num_replicas = None
    give_up_after_s = None
    members = ()
    gathers = False
    fault = None
    asks_to_gather = False

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        stock._init_sync = False  # DiLoCo starts the groups itself, ADR-006
        self.settings: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)

    @property
    def longest_wait_s(self) -> float:
        """Both timeouts: that of a quorum, and that of a collective."""
        return (self.stock._quorum_timeout + self.stock._timeout).total_seconds()

    def all_gather(self, gathered: Tensor, own: Tensor) -> Any:
        """Gather by an allreduce, since torchft's Manager has nothing else.

        A group could write into another's part.
        """
        rank = self.stock.participating_rank()
        gathered.zero_()
        gathered.view(-1, own.numel())[rank] = own
        return self.stock.allreduce(gathered, reduce_op=ReduceOp.SUM)


def as_diloco_manager(manager: Any) -> DiLoCoManager:
    """Return the manager itself, or torchft's own as a ``StockManager``."""
    return manager if hasattr(manager, "all_gather") else cast(DiLoCoManager, StockManager(manager))


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
