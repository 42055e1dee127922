"""The simulated network: quorums, heals and sums between threads, and scripted faults."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

FaultKind = Literal[
    "kill",
    "kill_before_vote",
    "kill_after_vote",
    "kill_in_heal",
    "restart",
    "fail_allreduce",
    "fail_commit",
    "fail_heal",
    "stale_quorum",
    "late",
]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, at a place in the script.

    Args:
        kind: One of these.

            * ``kill`` ends the replica in the middle of the sync: after its peers have counted it
              into the quorum, before it has sent anything. ``kill_before_vote`` ends it when the
              allreduce is over, ``kill_after_vote`` when its own vote is too, ``kill_in_heal`` when
              it is about to take over a donor's state.
            * ``restart`` is ``kill``, and the replica begins anew and joins again.
            * ``fail_allreduce`` is a connection that breaks: the allreduce of that sync fails in
              every replica. ``fail_commit`` is an error in one replica after the allreduce: it
              votes no while its peers commit. ``fail_heal`` is a download that breaks off.
            * ``stale_quorum`` is a quorum id used twice: the replica's part reaches nobody, and all
              believe it did.
            * ``late`` starts the replica only once its peers have reached ``step``.
        replica_id: Whose fault it is.
        step: The manager's step (1 after the cold start, and one more after every outer step) at
            which it happens, once.
    """

    kind: FaultKind
    replica_id: int
    step: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"Fault kind={self.kind!r}: use one of {', '.join(get_args(FaultKind))}"
            )


class Stopped(Exception):
    """Ends the thread of a replica that was killed, or whose peer raised."""

    def __init__(self, restarts: bool = False) -> None:
        super().__init__()
        self.restarts = restarts


@dataclass
class Quorum:
    """One quorum: its members in order, who has to heal, and the buffers of its collectives."""

    number: int
    members: tuple[int, ...]
    max_step: int
    state: dict[str, Any] | None
    is_broken: bool = False
    cut_off: set[int] = field(default_factory=set)
    buffers: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    complete: dict[int, list[Tensor]] = field(default_factory=dict)


class SharedBuffer:
    """The network: who is there, and the memory through which they average.

    torchft's semantics: a quorum forms when every live replica asks for one; whoever is behind
    heals from one that is not; if a member dies, the collectives of that quorum fail in the others.
    """

    def __init__(self, num_replicas: int, faults: Sequence[Fault], timeout_s: float | None) -> None:
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        self._faults = list(faults)
        self._late = {fault.replica_id: fault.step for fault in faults if fault.kind == "late"}
        self._alive = set(range(num_replicas)) - self._late.keys()
        self._asking: dict[int, tuple[int, Callable[[], dict[str, Any]]]] = {}
        self._quorum: Quorum | None = None
        self._is_stopped = False

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, with the lock held."""
        in_time = self._changed.wait_for(
            lambda: self._is_stopped or condition(), timeout=self._timeout_s
        )
        if self._is_stopped:
            raise Stopped
        if not in_time:
            raise TimeoutError(f"no {what} within timeout_s={self._timeout_s}")

    def strike(self, kind: str, replica_id: int, step: int) -> bool:
        """Whether this fault is due here; it then is used up."""
        with self._changed:
            for fault in self._faults:
                if (fault.kind, fault.replica_id, fault.step) == (kind, replica_id, step):
                    self._faults.remove(fault)
                    return True
        return False

    def wait_for_start(self, replica_id: int) -> None:
        """Hold a late replica until its peers have got far enough, or have all left."""
        with self._changed:
            self._wait_until(
                lambda: replica_id in self._alive or not self._alive,
                f"peer at step {self._late.get(replica_id)}",
            )
            self._alive.add(replica_id)

    def leave(self, replica_id: int) -> None:
        """The replica is gone: finished, killed or failed."""
        with self._changed:
            self._alive.discard(replica_id)
            if self._quorum is not None and replica_id in self._quorum.members:
                self._quorum.is_broken = True
            self._form_quorum()
            self._changed.notify_all()

    def stop(self) -> None:
        """End every replica at its next call."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join_quorum(self, replica_id: int, step: int, save: Callable[[], dict[str, Any]]) -> Quorum:
        """Ask for a quorum and wait until it has formed."""
        with self._changed:
            before = self._quorum
            self._asking[replica_id] = (step, save)
            # From here on the quorum waits for those whose time has come.
            self._alive |= {late for late, due in self._late.items() if due <= step}
            self._late = {late: due for late, due in self._late.items() if due > step}
            self._form_quorum()
            self._changed.notify_all()
            self._wait_until(
                lambda: self._quorum is not before and replica_id not in self._asking, "quorum"
            )
            assert self._quorum is not None
            return self._quorum

    def _form_quorum(self) -> None:
        if not self._asking or not self._alive <= self._asking.keys():
            return
        max_step = max(step for step, _ in self._asking.values())
        behind = any(step < max_step for step, _ in self._asking.values())
        donors = (save for _, (step, save) in sorted(self._asking.items()) if step == max_step)
        self._quorum = Quorum(
            number=self._quorum.number + 1 if self._quorum else 0,
            members=tuple(sorted(self._asking)),
            max_step=max_step,
            state=copy.deepcopy(next(donors)()) if behind else None,  # no memory is shared
        )
        self._asking.clear()

    def put(self, quorum: Quorum, number: int, replica_id: int, tensor: Tensor) -> None:
        """Hand in this replica's part of collective ``number`` of the quorum."""
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize()  # other threads, with streams of their own, read it
        with self._changed:
            buffer = quorum.buffers.setdefault(number, {})
            buffer[replica_id] = tensor.detach().clone()
            if len(buffer) == len(quorum.members) and not quorum.is_broken:
                shapes = {tuple(part.shape) for part in buffer.values()}
                if len(shapes) > 1:
                    quorum.is_broken = True
                else:
                    for member in quorum.cut_off:
                        buffer[member].zero_()
                    quorum.complete[number] = [buffer[member] for member in quorum.members]
                del quorum.buffers[number]
            self._changed.notify_all()

    def take(self, quorum: Quorum, number: int) -> list[Tensor] | None:
        """Wait for what all members handed in for collective ``number``; None if it failed.

        The tensors are shared by those who take them, and not to be written to.
        """
        with self._changed:
            self._wait_until(
                lambda: number in quorum.complete or quorum.is_broken, f"collective {number}"
            )
            return quorum.complete.get(number)  # a member that leaves later breaks no finished one

    def cut_off(self, quorum: Quorum, replica_id: int) -> None:
        """Let nothing of what this member sends in the quorum reach anybody."""
        with self._changed:
            quorum.cut_off.add(replica_id)

    def come_back(self, replica_id: int) -> None:
        """A replica that was killed is there again."""
        with self._changed:
            self._alive.add(replica_id)

    def break_quorum(self, quorum: Quorum) -> None:
        """Make what is under way in this quorum fail in every member."""
        with self._changed:
            quorum.is_broken = True
            self._changed.notify_all()
