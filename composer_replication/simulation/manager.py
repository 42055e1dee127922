"""A double of torchft's Manager, over the simulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.simulation.shared_buffer import Quorum, SharedBuffer, Stopped


class SimulatedWork:
    """Stands in for the Work that a Manager's collectives return.

    Args:
        manager: Whose it is.
        number: Which collective of the quorum.
        result: Where what comes out is written.
        combine: What comes out of the parts of all groups.
    """

    def __init__(
        self,
        manager: SimulatedManager,
        number: int,
        result: Tensor,
        combine: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._manager = manager
        self._number = number
        self._result = result
        self._combine = combine

    def wait(self, timeout: object = None) -> bool:
        """Write the result into its tensor. An error goes to the manager, as in torchft."""
        del timeout  # the simulation has one for all
        return self._manager.finish(self._number, self._result, self._combine)


class SimulatedManager:
    """Stands in for ``torchft.manager.Manager`` with ``use_async_quorum=False``.

    Args:
        network: The shared buffer.
        replica_id: From 0.
        min_replica_size: As in torchft: with fewer participants no vote is for commit.
    """

    def __init__(self, network: SharedBuffer, replica_id: int, min_replica_size: int = 1) -> None:
        self._use_async_quorum = False
        self._network = network
        self._replica_id = replica_id
        self._min_replica_size = min_replica_size
        self._step = 0
        self._batches_committed = 0
        self._quorum: Quorum | None = None
        self._num_collectives = 0
        self._error: Exception | None = None
        self._state_dict_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        if key in self._state_dict_fns:
            raise ValueError(f"state dict key {key!r} is registered already")
        self._state_dict_fns[key] = (load_state_dict, state_dict)

    def _save(self) -> dict[str, Any]:
        return {key: save() for key, (_, save) in self._state_dict_fns.items()}

    def start_quorum(self) -> None:
        self._error = None
        self._num_collectives = 0
        self._quorum = quorum = self._network.join_quorum(self._replica_id, self._step, self._save)
        if self._strikes("kill"):
            raise Stopped
        if self._strikes("restart"):
            raise Stopped(restarts=True)
        if self._strikes("stale_quorum"):
            self._network.cut_off(quorum, self._replica_id)
        if self._strikes("fail_allreduce"):
            self._network.break_quorum(quorum)
        if self._step < quorum.max_step:
            assert quorum.state is not None, "a quorum with someone behind has a donor's state"
            if self._network.strike("kill_in_heal", self._replica_id, quorum.max_step):
                raise Stopped
            if self._network.strike("fail_heal", self._replica_id, quorum.max_step):
                self._network.break_quorum(quorum)
                self.report_error(ConnectionError("scripted fault: fail_heal"))
                return
            self._step = quorum.max_step
            for key, (load, _) in self._state_dict_fns.items():
                load(quorum.state[key])

    def _strikes(self, kind: str) -> bool:
        return self._network.strike(kind, self._replica_id, self._step)

    def current_step(self) -> int:
        return self._step

    def batches_committed(self) -> int:
        return self._batches_committed

    def num_participants(self) -> int:
        return len(self._quorum.members) if self._quorum else 0

    def participating_rank(self) -> int | None:
        return self._quorum.members.index(self._replica_id) if self._quorum else None

    def allreduce(
        self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> SimulatedWork:
        if should_quantize:
            raise ValueError("should_quantize=True: the simulation does not quantise")
        if reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
            raise ValueError(f"reduce_op={reduce_op}: the simulation has SUM and AVG")
        mean_of = self.num_participants() if reduce_op == ReduceOp.AVG else 1

        def combine(parts: list[Tensor]) -> Tensor:
            total = sum(parts[1:], start=parts[0])
            return total / mean_of if mean_of > 1 else total

        return self._start(tensor, tensor, combine)

    def all_to_all(self, received: Tensor, sent: Tensor) -> SimulatedWork:
        groups, rank = self.num_participants(), self.participating_rank()
        assert rank is not None, "all_to_all before start_quorum"
        return self._start(
            sent, received, lambda parts: torch.cat([part.chunk(groups)[rank] for part in parts])
        )

    def all_gather(self, gathered: Tensor, own: Tensor) -> SimulatedWork:
        return self._start(own, gathered, torch.cat)

    def _start(
        self, sent: Tensor, result: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> SimulatedWork:
        assert self._quorum is not None, "a collective before start_quorum"
        number = self._num_collectives
        self._num_collectives += 1
        if self._error is None:
            self._network.put(self._quorum, number, self._replica_id, sent)
        return SimulatedWork(self, number, result, combine)

    def finish(
        self, number: int, result: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> bool:
        assert self._quorum is not None, "wait before start_quorum"
        if self._error is not None:
            return False
        parts = self._network.take(self._quorum, number)
        if parts is None:
            self.report_error(ConnectionError("a peer left during a collective"))
            return False
        with torch.no_grad():
            result.copy_(combine(parts))
        return True

    def errored(self) -> Exception | None:
        return self._error

    def report_error(self, e: Exception) -> None:
        self._error = e

    def should_commit(self) -> bool:
        if self._strikes("kill_before_vote"):
            raise Stopped
        if self._strikes("fail_commit"):
            self.report_error(RuntimeError("scripted fault: fail_commit"))
        if self._error is not None or self.num_participants() < self._min_replica_size:
            return False
        if self._strikes("kill_after_vote"):
            raise Stopped
        self._step += 1
        self._batches_committed += self.num_participants()
        return True

    def allow_state_dict_read(self) -> None:
        """Nothing to do: a donor is asked only while it waits in a quorum."""

    def disallow_state_dict_read(self) -> None:
        """Nothing to do, see ``allow_state_dict_read``."""

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step = state_dict["step"]
        self._batches_committed = state_dict["batches_committed"]

    def shutdown(self, wait: bool = True) -> None:
        """Leave, so that the peers' next quorum does not wait for this replica."""
        del wait
        self._network.leave(self._replica_id)
