"""The simulated network: quorums, heals and collectives between threads, and scripted faults."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    "left_behind",
]


@dataclass(frozen=True)
class Fault:
    """A scripted fault of one replica.

    Args:
        kind: What fails.

            * ``kill`` ends the replica in the middle of a sync: its peers have counted it into the
              quorum, and it has sent nothing yet. ``kill_before_vote`` ends it after the allreduce,
              ``kill_after_vote`` after its own vote, and ``kill_in_heal`` just before it loads a
              donor's state.
            * ``restart`` is ``kill``, after which the replica starts again and joins.
            * ``fail_allreduce`` breaks a connection: the allreduce of that sync fails in every
              replica. ``fail_commit`` is an error in one replica after the allreduce: it votes no
              while its peers commit. ``fail_heal`` interrupts a download.
            * ``stale_quorum`` uses a quorum id twice: the peers do not receive what the replica
              sends, and get no error.
            * ``late`` starts the replica only when its peers have reached ``step``.
            * ``left_behind`` stops the replica when it asks for a quorum, until its peers have
              committed two syncs without it.
        replica_id: The replica that fails.
        step: The manager's step at which it fails, once. The step is 1 after the cold start and
            grows by 1 with every outer step.

    Raises:
        ValueError: There is no such ``kind``.
    """

    kind: FaultKind
    replica_id: int
    step: int

    def __post_init__(self) -> None:
        kinds = get_args(FaultKind)
        if self.kind not in kinds:
            raise ValueError(f"kind={self.kind!r}: use {' or '.join(kinds)}")


class Stopped(Exception):
    """Ends the thread of a replica that a fault killed, or whose peer raised an exception.

    Args:
        restarts: Whether the replica starts again.
    """

    def __init__(self, restarts: bool = False) -> None:
        super().__init__()
        self.restarts = restarts


Sent = dict[int, Tensor]
"""The tensors of one collective by member. Nothing is added after a failure, so all members' are
there only if the collective has succeeded."""


@dataclass
class Connection:
    """The buffers of the collectives between the members of one quorum, or of several in a row.

    As in torchft, members connect again when their set has changed and after a failure.

    Attributes:
        members: Ids of the replicas in it, in ascending order.
        is_broken: Whether the collectives that have not completed fail.
        isolated: Members whose tensors are replaced by zeros.
        started: How many collectives each member has started.
        begun: The collectives that not all members have started, by number: what they have sent.
    """

    members: tuple[int, ...]
    is_broken: bool = False
    isolated: set[int] = field(default_factory=set)
    started: Counter[int] = field(default_factory=Counter)
    begun: dict[int, Sent] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What a replica reports when it asks for a quorum.

    Attributes:
        step: Its step.
        has_failed: Whether its last sync failed, so that all connect again.
        save: Returns its state; called if the replica becomes a donor.
        gathers: Whether it asks that messages are gathered, and not summed.
        settings: All that has to be equal in all replicas.
    """

    step: int
    has_failed: bool
    save: Callable[[], dict[str, Any]]
    gathers: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Quorum:
    """One quorum.

    Attributes:
        requests: What its members have reported, by their ids in ascending order.
        donor: The first member at the largest step. Members that are behind heal to it.
        state: The donor's state; None if nobody has to heal.
        connection: The connection through which its members send.
    """

    requests: Mapping[int, Request]
    donor: int
    state: dict[str, Any] | None
    connection: Connection

    @property
    def max_step(self) -> int:
        """The manager step of the member that is furthest: the others heal to it."""
        return self.requests[self.donor].step


class SharedBuffer:
    """The memory through which the replicas average, and the list of replicas that are alive.

    It follows torchft: a quorum forms when every live replica requests one; a replica that is
    behind heals from one that is not; when a member dies, the collectives of its quorum fail in the
    others.

    All state is guarded by one condition, ``_changed``. A thread that changes the state notifies
    it: otherwise the other threads would sleep until their timeout.

    Args:
        num_replicas: Number of replicas, including those that start late.
        faults: Scripted faults. Each happens once.
        timeout_s: Longest wait of a replica for its peers, in seconds; None waits for ever.
    """

    def __init__(self, num_replicas: int, faults: Sequence[Fault], timeout_s: float | None) -> None:
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        self._faults = list(faults)
        self._late = {fault.replica_id: fault.step for fault in faults if fault.kind == "late"}
        self._alive = set(range(num_replicas)) - self._late.keys()
        self._requests: dict[int, Request] = {}
        self._quorum = Quorum({}, 0, None, Connection(()))  # before the first one
        self._is_stopped = False

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. The caller holds the lock.

        Raises:
            Stopped: The simulation has been stopped.
            TimeoutError: The condition did not become true in time.
        """
        in_time = self._changed.wait_for(
            lambda: self._is_stopped or condition(), timeout=self._timeout_s
        )
        if self._is_stopped:
            raise Stopped
        if not in_time:
            raise TimeoutError(
                f"no {what} within timeout_s={self._timeout_s}: a peer is too slow or waits for "
                "ever. Raise timeout_s, or end every replica at the same step"
            )

    def happens(self, kind: FaultKind, replica_id: int, step: int) -> bool:
        """Whether a fault of this kind is scripted for this replica and step. Each happens once."""
        fault = Fault(kind, replica_id, step)
        with self._changed:
            is_scripted = fault in self._faults
            if is_scripted:
                self._faults.remove(fault)
        return is_scripted

    def wait_for_start(self, replica_id: int) -> None:
        """Hold a late replica until its peers have reached its step or have all left."""
        with self._changed:
            self._wait_until(
                lambda: replica_id in self._alive or not self._alive,
                f"peer at step {self._late.get(replica_id)}",
            )
            self._alive.add(replica_id)

    def leave(self, replica_id: int, *, restarts: bool = False) -> None:
        """Remove a replica that has finished, was killed, or failed.

        Open collectives of its quorum fail, and the next quorum no longer waits for it, unless it
        restarts.
        """
        with self._changed:
            if restarts:
                self._alive.add(replica_id)  # its manager may have left already
            else:
                self._alive.discard(replica_id)
            if replica_id in self._quorum.requests:
                self._quorum.connection.is_broken = True
            self._form_quorum()
            self._changed.notify_all()

    def stop(self) -> None:
        """End every replica at its next call."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def join_quorum(self, replica_id: int, request: Request) -> Quorum:
        """Request a quorum and wait until it has formed.

        Args:
            replica_id: The replica that requests it.
            request: What it reports.

        Returns:
            The quorum, of which the replica is a member.
        """
        with self._changed:
            if self.happens("left_behind", replica_id, request.step):
                self._late[replica_id] = request.step + 2
                self.leave(replica_id)
                self.wait_for_start(replica_id)
            before = self._quorum
            self._requests[replica_id] = request
            # From here on a quorum waits for the late replicas whose step has been reached.
            due = [late for late, step in self._late.items() if step <= request.step]
            self._alive.update(due)
            for late in due:
                del self._late[late]
            self._form_quorum()
            self._changed.notify_all()
            self._wait_until(
                lambda: self._quorum is not before and replica_id not in self._requests, "quorum"
            )
            return self._quorum

    def _form_quorum(self) -> None:
        if not self._requests or not self._alive <= self._requests.keys():
            return
        requests = dict(sorted(self._requests.items()))
        self._requests.clear()
        donor = max(requests, key=lambda member: requests[member].step)
        has_joiner = any(request.step < requests[donor].step for request in requests.values())
        state = copy.deepcopy(requests[donor].save()) if has_joiner else None  # no shared memory
        self._quorum = Quorum(requests, donor, state, self._connect(requests))

    def _connect(self, requests: Mapping[int, Request]) -> Connection:
        members = tuple(requests)
        last = self._quorum.connection
        has_failed = last.is_broken or any(request.has_failed for request in requests.values())
        if last.members == members and not has_failed:
            return last
        last.is_broken = True
        return Connection(members)

    def send(self, connection: Connection, replica_id: int, tensor: Tensor) -> Sent:
        """Store a member's tensor for its next collective of a connection.

        Args:
            connection: The connection.
            replica_id: The member.
            tensor: The member's tensor, which is copied if there are other members.

        Returns:
            What the members send in this collective, for ``receive``.
        """
        tensor = tensor.detach()
        if len(connection.members) > 1:  # other threads read it
            tensor = tensor.clone()
            if tensor.device.type != "cpu":
                # They read it on streams of their own. Without this they could read it before the
                # device has written it.
                torch.accelerator.synchronize()
        with self._changed:
            number = connection.started[replica_id]
            connection.started[replica_id] += 1
            sent = connection.begun.setdefault(number, {})
            if connection.is_broken:
                return sent
            if replica_id in connection.isolated:
                tensor = torch.zeros_like(tensor)
            sent[replica_id] = tensor
            if len(sent) == len(connection.members):
                del connection.begun[number]
            if len({part.shape for part in sent.values()}) > 1:
                connection.is_broken = True
                sent.clear()
            self._changed.notify_all()
            return sent

    def receive(self, connection: Connection, sent: Sent) -> list[Tensor] | None:
        """Wait for the tensors of all members for one collective.

        Args:
            connection: The connection.
            sent: What ``send`` has returned.

        Returns:
            The tensors, in the order of the members; None if the collective failed. All members
            receive the same tensors, so nobody may write to them.
        """
        with self._changed:
            members = connection.members
            self._wait_until(
                lambda: len(sent) == len(members) or connection.is_broken,
                f"collective of replicas {members}",
            )
            # A member that leaves later does not fail a collective that is over.
            if len(sent) < len(members):
                return None
            return [sent[member] for member in members]

    def break_connection(self, connection: Connection) -> None:
        """Fail the open collectives of this connection in every member."""
        with self._changed:
            connection.is_broken = True
            self._changed.notify_all()
