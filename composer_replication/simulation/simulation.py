"""k replica groups as threads of one process, over a shared-buffer mock allreduce.

``diloco/`` runs unchanged and does not know: the simulation enters through the manager alone.
Threads, because torchft starts and awaits an allreduce inside one ``optimizer.step()``, so that
replicas cannot be stepped in turn (ADR-007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.simulation.manager import SimulatedManager
from composer_replication.simulation.shared_buffer import Fault, SharedBuffer, Stopped

__all__ = ["Fault", "SimulatedManager", "SimulatedReplica", "SimulationError", "simulate"]


class SimulationError(RuntimeError):
    """A replica raised; its exception is the cause."""


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
            results[replica_id] = _run_and_restart(replica_fn, replica_id, num_replicas, network)
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


def _run_and_restart(
    replica_fn: Callable[[SimulatedReplica], Any],
    replica_id: int,
    num_replicas: int,
    network: SharedBuffer,
) -> Any:
    while True:
        manager = SimulatedManager(network, replica_id)
        try:
            return replica_fn(SimulatedReplica(replica_id, num_replicas, manager))
        except Stopped as stopped:
            if not stopped.restarts:
                raise
            network.leave(replica_id)
            network.come_back(replica_id)
