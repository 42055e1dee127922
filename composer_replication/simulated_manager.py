"""A double of torchft's Manager, over the simulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.shared_buffer import Quorum, SharedBuffer, Stopped


class SimulatedWork:
    """Stands in for the Work that ``Manager.allreduce`` returns."""

    def __init__(
        self, manager: SimulatedManager, number: int, tensor: Tensor, mean_of: int
    ) -> None:
        self._manager = manager
        self._number = number
        self._tensor = tensor
        self._mean_of = mean_of

    def wait(self, timeout: object = None) -> bool:
        """Write the sum or mean into the tensor. An error goes to the manager, as in torchft."""
        del timeout  # the simulation has one for all
        return self._manager.finish_allreduce(self._number, self._tensor, self._mean_of)


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
        self._num_allreduces = 0
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
        self._num_allreduces = 0
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
        assert self._quorum is not None, "allreduce before start_quorum"
        number = self._num_allreduces
        self._num_allreduces += 1
        if self._error is None:
            self._network.put(self._quorum, number, self._replica_id, tensor)
        mean_of = self.num_participants() if reduce_op == ReduceOp.AVG else 1
        return SimulatedWork(self, number, tensor, mean_of)

    def finish_allreduce(self, number: int, tensor: Tensor, mean_of: int) -> bool:
        assert self._quorum is not None, "wait before start_quorum"
        if self._error is not None:
            return False
        total = self._network.take(self._quorum, number)
        if total is None:
            self.report_error(ConnectionError("a peer left during the allreduce"))
            return False
        with torch.no_grad():
            tensor.copy_(total / mean_of if mean_of > 1 else total)
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
