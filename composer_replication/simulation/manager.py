"""A simulated torchft Manager that averages over a ``SharedBuffer``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.replica.single_group import Collective, SingleGroupManager
from composer_replication.settings import compare_groups
from composer_replication.simulation.shared_buffer import (
    Connection,
    FaultKind,
    Quorum,
    Request,
    SharedBuffer,
    Stopped,
)

log = logging.getLogger(__name__)


class SimulatedManager(SingleGroupManager):
    """Replaces ``torchft.manager.Manager`` with ``use_async_quorum=False``.

    Args:
        network: The memory that all replicas share.
        replica_id: Number of the replica, from 0.
    """

    def __init__(self, network: SharedBuffer, replica_id: int) -> None:
        super().__init__()
        self._network = network
        self._replica_id = replica_id
        self._quorum = Quorum({}, replica_id, None, Connection(()))  # before the first one
        self._has_failed = False
        self.num_replicas = None

    def _user_state_dict(self) -> dict[str, Any]:
        return {key: save() for key, (_, save) in self._state_dict_fns.items()}

    def start_quorum(self) -> None:
        """Join the next quorum, and heal from a peer if this replica is behind.

        Raises:
            Stopped: A scripted fault kills this replica here.
        """
        has_failed = self._has_failed or self._error is not None
        request = Request(
            self._step, has_failed, self._user_state_dict, self.asks_to_gather, self.settings
        )
        self._error = None
        self._has_failed = False
        quorum = self._join_quorum(request)
        self._quorum = quorum
        if self._fault_happens("kill"):
            raise Stopped
        if self._fault_happens("restart"):
            raise Stopped(restarts=True)
        if self._fault_happens("stale_quorum"):
            quorum.connection.isolated.add(self._replica_id)
        if self._fault_happens("fail_allreduce"):
            self._network.break_connection(quorum.connection)
        if quorum.state is not None and self._step < quorum.max_step:
            if self._network.happens("kill_in_heal", self._replica_id, quorum.max_step):
                raise Stopped
            if self._network.happens("fail_heal", self._replica_id, quorum.max_step):
                self._network.break_connection(quorum.connection)
                self.report_error(ConnectionError("scripted fault: fail_heal"))
                return
            self._step = quorum.max_step
            for key, (load, _) in self._state_dict_fns.items():
                load(quorum.state[key])

    def _join_quorum(self, request: Request) -> Quorum:
        """Ask for a quorum until all its members have the same settings."""
        while True:
            quorum = self._network.join_quorum(self._replica_id, request)
            settings = {str(id): request.settings for id, request in quorum.requests.items()}
            others = compare_groups(settings, str(self._replica_id), str(quorum.donor))
            if not others:
                return quorum
            for warning in others.values():
                log.warning("%s", warning)

    def _fault_happens(self, kind: FaultKind) -> bool:
        return self._network.happens(kind, self._replica_id, self._step)

    def num_participants(self) -> int:
        """The number of members of the quorum; 0 before the first one."""
        return len(self._quorum.requests)

    @property
    def gathers(self) -> bool:
        """Whether a member of the quorum asks that messages are gathered."""
        return any(request.gathers for request in self._quorum.requests.values())

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of the replicas in the quorum; empty before the first one."""
        return tuple(map(str, self._quorum.requests))

    def participating_rank(self) -> int | None:
        """The rank of this replica in the quorum; None before the first one."""
        return self.members.index(str(self._replica_id)) if self.members else None

    def allreduce(
        self,
        tensor: Tensor,
        should_quantize: bool = False,
        reduce_op: Any = ReduceOp.AVG,
    ) -> Collective:
        """Start to replace a tensor by its sum or mean over the quorum.

        Args:
            tensor: This replica's tensor, and the result after ``wait``.
            should_quantize: Has to be False.
            reduce_op: ``ReduceOp.SUM`` or ``ReduceOp.AVG``.

        Raises:
            ValueError: ``should_quantize`` is True, or the operation is another one.
        """
        self._check_operation(should_quantize, reduce_op)
        mean_of = self.num_participants() if reduce_op == ReduceOp.AVG else 1

        def combine(parts: list[Tensor]) -> Tensor:
            total = sum(parts[1:], start=parts[0])
            return total / mean_of if mean_of > 1 else total

        return self._start(tensor, tensor, combine)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Collective:
        """Start to exchange chunks: member ``i`` receives the ``i``-th chunk of every member.

        Args:
            received: The result after ``wait``.
            sent: This replica's chunks, one for each member.
        """
        groups = self.num_participants()
        rank = self.participating_rank()
        assert rank is not None, "all_to_all before start_quorum"

        def combine(parts: list[Tensor]) -> Tensor:
            return torch.cat([part.chunk(groups)[rank] for part in parts])

        return self._start(sent, received, combine)

    def all_gather(self, gathered: Tensor, own: Tensor) -> Collective:
        """Start to concatenate the tensors of all members.

        Args:
            gathered: The result after ``wait``.
            own: This replica's tensor.
        """
        return self._start(own, gathered, torch.cat)

    def _start(
        self,
        sent: Tensor,
        result: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> Collective:
        """Send a tensor to all members.

        Args:
            sent: This replica's tensor.
            result: The tensor that receives the result.
            combine: Computes the result from the tensors of all members, in their order.
        """
        if self._error is not None:
            return Collective(self._is_sound)
        connection = self._quorum.connection
        begun = self._network.send(connection, self._replica_id, sent)

        def finish() -> bool:
            if self._error is not None:
                return False
            parts = self._network.receive(connection, begun)
            if parts is None:
                self.report_error(ConnectionError("a peer left during a collective"))
                return False
            with torch.no_grad():
                result.copy_(combine(parts))
            if sent.device.type != "cpu":
                # The parts were allocated on their senders' streams. Once this thread drops them, a
                # sender could write anew into memory that this thread's stream has yet to read.
                torch.accelerator.synchronize()
            return True

        return Collective(finish)

    def should_commit(self) -> bool:
        """Decide whether this replica commits the sync. As in torchft, each replica decides alone.

        Returns:
            Whether there was no error and the quorum has ``min_replica_size`` members.

        Raises:
            Stopped: A scripted fault kills this replica here.
        """
        if self._fault_happens("kill_before_vote"):
            raise Stopped
        if self._fault_happens("fail_commit"):
            self.report_error(RuntimeError("scripted fault: fail_commit"))
        if self._error is not None or self.num_participants() < self._min_replica_size:
            self._has_failed = True
            return False
        if self._fault_happens("kill_after_vote"):
            raise Stopped
        self._step += 1
        self._batches_committed += self.num_participants()
        return True

    def shutdown(self, wait: bool = True) -> None:
        """Leave the simulation, so that the peers' next quorum does not wait for this replica."""
        del wait
        self._network.leave(self._replica_id)
