"""k replica groups as threads of one process, over a shared-buffer mock allreduce.

``diloco/`` runs unchanged and does not know: the simulation enters through the manager alone.
Threads, because torchft starts and awaits an allreduce inside one ``optimizer.step()``, so that
replicas cannot be stepped in turn (ADR-007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ReduceOp

FAULTS = ("kill", "fail_allreduce", "fail_commit", "late")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, at a place in the script.

    Args:
        kind: ``kill`` ends the replica in the middle of the sync: after its peers have counted it
            into the quorum, before it has sent anything. ``fail_allreduce`` is a connection that
            breaks: the allreduce of that sync fails in every replica. ``fail_commit`` is an error
            in one replica after the allreduce: it votes no while its peers commit. ``late``
            starts the replica only once its peers have reached ``step``.
        replica_id: Whose fault it is.
        step: The manager's step (committed votes so far; 1 after the cold start) at which it
            happens, once.
    """

    kind: Literal["kill", "fail_allreduce", "fail_commit", "late"]
    replica_id: int
    step: int

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"Fault kind={self.kind!r}: use one of {', '.join(FAULTS)}")


class SimulationError(RuntimeError):
    """A replica raised; its exception is the cause."""


class Stopped(Exception):
    """Ends the thread of a replica that was killed, or whose peer raised."""


@dataclass(frozen=True)
class SimulatedReplica:
    """What a replica function gets.

    Attributes:
        replica_id: From 0.
        num_replicas: How many there are.
        manager: Stands in for ``torchft.manager.Manager``.
    """

    replica_id: int
    num_replicas: int
    manager: SimulatedManager


def simulate(
    replica_fn: Callable[[SimulatedReplica], Any],
    *,
    num_replicas: int,
    faults: Sequence[Fault] = (),
    timeout_s: float | None = 60.0,
) -> list[Any]:
    """Run ``replica_fn`` once for each replica group, at the same time, in this process.

    Bitwise repeatable: sums run in the order of the replicas. Torch's default random generator is
    shared by the threads, so data and dropout need generators of their own.

    Args:
        replica_fn: The training of one replica group; builds ``DiLoCo`` over ``sim.manager``.
        num_replicas: How many to run.
        faults: What goes wrong, and when.
        timeout_s: How long a replica waits for its peers before all are stopped, in seconds; None
            for ever.

    Returns:
        What each call returned, in the order of the replicas; None for a killed one.

    Raises:
        SimulationError: A replica raised; the message says which, and it is the ``__cause__``.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas}: use at least 1")
    for fault in faults:
        if not 0 <= fault.replica_id < num_replicas:
            raise ValueError(
                f"{fault} names replica {fault.replica_id}, but there are replicas 0 to "
                f"{num_replicas - 1}"
            )
    network = SharedBuffer(num_replicas, faults, timeout_s)
    results: list[Any] = [None] * num_replicas
    errors: dict[int, BaseException] = {}

    def run(replica_id: int) -> None:
        try:
            network.wait_for_start(replica_id)
            manager = SimulatedManager(network, replica_id)
            results[replica_id] = replica_fn(SimulatedReplica(replica_id, num_replicas, manager))
        except Stopped:
            pass
        except BaseException as error:  # noqa: B036 - handed to the caller below
            errors[replica_id] = error
            network.stop()
        finally:
            network.leave(replica_id)

    threads = [
        threading.Thread(target=run, args=(i,), name=f"replica_{i}", daemon=True)
        for i in range(num_replicas)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        replica_id, error = min(errors.items())
        raise SimulationError(
            f"replica {replica_id} raised {type(error).__name__}: {error}"
        ) from error
    return results


@dataclass
class _Quorum:
    """One quorum: its members in order, who has to heal, and the buffers of its allreduces."""

    number: int
    members: tuple[int, ...]
    max_step: int
    state: dict[str, Any] | None
    is_broken: bool = False
    buffers: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)


class SharedBuffer:
    """The network: who is there, and the memory through which they average.

    torchft's semantics: a quorum forms when every live replica asks for one; whoever is behind
    heals from one that is not; if a member dies, the allreduces of that quorum fail in the others.
    """

    def __init__(self, num_replicas: int, faults: Sequence[Fault], timeout_s: float | None) -> None:
        self._changed = threading.Condition()
        self._timeout_s = timeout_s
        self._faults = list(faults)
        self._late = {fault.replica_id: fault.step for fault in faults if fault.kind == "late"}
        self._alive = set(range(num_replicas)) - self._late.keys()
        self._asking: dict[int, tuple[int, Callable[[], dict[str, Any]]]] = {}
        self._quorum: _Quorum | None = None
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

    def join_quorum(
        self, replica_id: int, step: int, save: Callable[[], dict[str, Any]]
    ) -> _Quorum:
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
        self._quorum = _Quorum(
            number=self._quorum.number + 1 if self._quorum else 0,
            members=tuple(sorted(self._asking)),
            max_step=max_step,
            state=next(donors)() if behind else None,
        )
        self._asking.clear()

    def put(self, quorum: _Quorum, number: int, replica_id: int, tensor: Tensor) -> None:
        """Hand in this replica's part of allreduce ``number`` of the quorum."""
        with self._changed:
            buffer = quorum.buffers.setdefault(number, {})
            buffer[replica_id] = tensor.detach().clone()
            if len(buffer) == len(quorum.members) and not quorum.is_broken:
                shapes = {tuple(part.shape) for part in buffer.values()}
                if len(shapes) > 1:
                    quorum.is_broken = True
                else:
                    parts = [buffer[member] for member in quorum.members]
                    quorum.sums[number] = sum(parts[1:], start=parts[0])
                del quorum.buffers[number]
            self._changed.notify_all()

    def take(self, quorum: _Quorum, number: int) -> Tensor | None:
        """Wait for the sum of allreduce ``number``; None if it failed."""
        with self._changed:
            self._wait_until(
                lambda: number in quorum.sums or quorum.is_broken, f"allreduce {number}"
            )
            return quorum.sums.get(number)  # a member that leaves later breaks no finished sum

    def break_quorum(self, quorum: _Quorum) -> None:
        """Make what is under way in this quorum fail in every member."""
        with self._changed:
            quorum.is_broken = True
            self._changed.notify_all()


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
        self._quorum: _Quorum | None = None
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
        if self._network.strike("kill", self._replica_id, self._step):
            raise Stopped
        if self._network.strike("fail_allreduce", self._replica_id, self._step):
            self._network.break_quorum(quorum)
        if self._step < quorum.max_step:
            assert quorum.state is not None, "a quorum with someone behind has a donor's state"
            self._step = quorum.max_step
            for key, (load, _) in self._state_dict_fns.items():
                load(quorum.state[key])

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

    def report_error(self, error: Exception) -> None:
        self._error = error

    def should_commit(self) -> bool:
        if self._network.strike("fail_commit", self._replica_id, self._step):
            self.report_error(RuntimeError("scripted fault: fail_commit"))
        if self._error is not None or self.num_participants() < self._min_replica_size:
            return False
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
