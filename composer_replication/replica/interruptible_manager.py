"""A torchft Manager whose waits end when a signal comes, or when a peer reports an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions  # pyright: ignore[reportPrivateImportUsage]
from torchft.manager import Manager, _ManagedWork
from torchft.process_group import ProcessGroupNCCL
from torchft.utils import get_stream_context
from torchft.work import _DummyWork

from composer_replication.diloco.torchft_api import Then
from composer_replication.replica.rendezvous import SyncAlarm
from composer_replication.util.daemon_executor import DaemonExecutor


class InterruptibleWork(NamedTuple):
    """Waits for a collective in short waits, between which Python handles signals.

    gloo's own wait is one call into C++, in which Python handles no signal for up to ``timeout``.

    Attributes:
        work: torchft's ``Work``.
        is_broken: Says whether the collective can never end well. The wait then ends without it.
            The collective's tensors must not be used again: gloo may write to them until its own
            ``timeout``.
    """

    work: Any
    is_broken: Callable[[], bool]

    LONGEST_WAIT = timedelta(milliseconds=10)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the collective.

        Returns:
            False if the collective is broken, else what torchft's ``wait`` returns.
        """
        sent = getattr(self.work, "_work", None)  # None after an error: torchft has sent nothing
        while sent is not None and not sent.is_completed():
            if self.is_broken():
                return False
            with suppress(RuntimeError):  # it is not over yet, or has failed: see torchft's wait
                sent.wait(self.LONGEST_WAIT)
        return self.work.wait(timeout)


class InterruptibleManager(Manager):
    """The collectives and the vote of one sync; ``ReplicaManager`` adds quorum and leaving.

    torchft waits for a collective inside gloo, and for a vote inside its Rust client. Python
    handles no signal meanwhile, so SIGTERM or Ctrl-C would do nothing for up to ``timeout``. Here
    the main thread waits in short sleeps. It also looks at the connection's ``SyncAlarm``, so an
    error that one member sees in a collective ends it on all members within a second.

    Over NCCL collectives are waited for as in torchft: their ``wait`` only queues work on the
    stream, and nothing ends what hangs there before ``timeout`` (ADR-057).

    Args:
        **arguments: torchft's (``manager.py``, ``Manager``).
    """

    BROKEN_AFTER_S = 0.5
    """How long after an alarm a collective may still end well, in seconds: data in the network
    arrives, and the members then vote on whether their collective has ended well."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._executor = DaemonExecutor()  # in the place of torchft's ThreadPoolExecutor
        self._alarm: SyncAlarm | None = None

    def report_error(self, e: Exception) -> None:
        """Note an error of the current sync, as torchft does, and raise the alarm for the peers.

        Without the alarm a peer would wait for this group's part until its own timeout.
        """
        super().report_error(e)
        if self._alarm is not None:
            self._alarm.raise_for_all()

    def _is_broken(self) -> bool:
        """Whether the collectives under way can never end well."""
        if self.errored():
            return True
        age = None if self._alarm is None else self._alarm.age_s()
        if age is None or age < self.BROKEN_AFTER_S:
            return False
        self.report_error(ConnectionError("another replica group reports that this sync failed"))
        return True

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp = ReduceOp.AVG,  # pyright: ignore[reportArgumentType]
    ) -> Any:
        """Start an allreduce, as torchft does. Over gloo a signal can interrupt the wait."""
        carried = self._carried(tensor)
        work = super().allreduce(carried, should_quantize, reduce_op)
        return self._interruptible(work, carried, tensor)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Start to send each group its part of ``sent``. Errors are handled as in ``allreduce``.

        Args:
            received: 1-D; the parts from all groups, in the order of the groups.
            sent: 1-D; as many equal parts as there are groups.
        """
        return self._start_collective(
            lambda into: self._pg.alltoall_base(
                into, self._carried(sent), [], [], AllToAllOptions()
            ),
            received,
        )

    def all_gather(self, gathered: Tensor, own: Tensor) -> Any:
        """Start to send ``own`` to all groups. Errors are handled as in ``allreduce``.

        Args:
            gathered: 1-D; the parts from all groups, in the order of the groups.
            own: This group's part.
        """
        return self._start_collective(
            lambda into: self._pg.allgather(
                [list(into.chunk(into.numel() // own.numel()))],
                [self._carried(own)],
                AllgatherOptions(),
            ),
            gathered,
        )

    def _start_collective(self, start: Callable[[Tensor], Any], result: Tensor) -> Any:
        """Do for a collective that torchft's Manager lacks what ``Manager.allreduce`` does.

        After an error in the same sync nothing is sent: the sync cannot commit any more.
        """
        if not self.errored():
            carried = self._carried(result)
            try:
                work = _ManagedWork(self, start(carried), carried)
                return self._interruptible(work, carried, result)
            except Exception as error:
                self.report_error(error)
        return _DummyWork(result)

    @property
    def _is_over_nccl(self) -> bool:
        return isinstance(self._pg, ProcessGroupNCCL)

    def _carried(self, tensor: Tensor) -> Tensor:
        """What is sent for a tensor: itself, or a copy in host memory of what gloo cannot send.

        gloo sends a CUDA tensor through host memory by itself (ADR-057).
        """
        can_be_sent = self._is_over_nccl or tensor.device.type in ("cpu", "cuda")
        return tensor if can_be_sent else tensor.cpu()

    def _interruptible(self, work: Any, carried: Tensor, result: Tensor) -> Any:
        if self._is_over_nccl:
            return work
        work = InterruptibleWork(work, self._is_broken)
        return work if carried is result else Then(work, lambda: result.copy_(carried))

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Vote, as torchft does. A signal can interrupt the wait.

        The vote waits for the other ranks of the group, one of which may have died. On a thread of
        its own it blocks no signal. torchft synchronises that thread's current stream there, so it
        is made the one of the calling thread.
        """
        available = torch.accelerator.is_available()
        stream = torch.accelerator.current_stream() if available else None
        vote = super().should_commit

        def on_stream() -> bool:
            with get_stream_context(stream):
                return vote(timeout)

        return self._executor.submit(on_stream).result()
