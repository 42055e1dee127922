"""Runs k replica groups as threads of one process that average through shared memory.

The package ``diloco`` runs unchanged: only the manager is another one. The replicas are threads
because torchft starts and awaits an allreduce inside one ``optimizer.step()``, so a single thread
cannot step them in turn (ADR-007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.arguments import check_integer
from composer_replication.simulation.manager import SimulatedManager
from composer_replication.simulation.shared_buffer import Fault, SharedBuffer, Stopped

__all__ = ["Fault", "SimulatedManager", "SimulatedReplica", "SimulationError", "simulate"]


class SimulationError(RuntimeError):
    """A replica raised an exception, which is the ``__cause__`` of this one."""


@dataclass(frozen=True)
class SimulatedReplica:
    """What ``simulate`` passes to the replica function.

    Attributes:
        replica_id: Number of the replica, from 0.
        num_replicas: Number of replicas in the simulation.
        manager: The manager of this replica, in place of torchft's: pass it to ``DiLoCo``.
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
    """Run ``replica_fn`` once for each replica group, all at the same time, in this process.

    Results are bitwise reproducible: sums are computed in the order of the replicas. The threads
    share torch's default random generator, so data and dropout need generators of their own. Do not
    compile models with ``torch.compile``: its compiler fails when two threads compile at a time.

    Args:
        replica_fn: Trains one replica group. It builds ``DiLoCo`` on ``sim.manager``.
        num_replicas: Number of replicas to run.
        faults: Faults to inject: each a ``Fault``.
        timeout_s: Longest wait of a replica for its peers, in seconds. After it, all replicas are
            stopped. None waits for ever.

    Returns:
        What each call returned, in the order of the replicas; None for a replica that was killed.

    Raises:
        ValueError: ``num_replicas`` is below 1, or a fault names a replica that does not exist.
        SimulationError: A replica raised. The message names it, and its exception is the
            ``__cause__``.
    """
    check_integer("num_replicas", num_replicas, at_least=1)
    for fault in faults:
        if not 0 <= fault.replica_id < num_replicas:
            raise ValueError(
                f"{fault} names replica {fault.replica_id}, but there are replicas 0 to "
                f"{num_replicas - 1}"
            )
    network = SharedBuffer(num_replicas, faults, timeout_s)
    results: list[Any] = [None] * num_replicas
    errors: dict[int, BaseException] = {}

    def is_restarted(replica_id: int) -> bool:
        sim = SimulatedReplica(replica_id, num_replicas, SimulatedManager(network, replica_id))
        try:
            results[replica_id] = replica_fn(sim)
        except Stopped as stopped:
            return stopped.restarts
        return False

    def run(replica_id: int) -> None:
        try:
            network.wait_for_start(replica_id)
            while is_restarted(replica_id):
                network.leave(replica_id, restarts=True)
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
