"""The simulated network: it averages, keeps torchft's semantics and breaks as scripted."""

import threading

import pytest
import torch
from torch.distributed import ReduceOp

from composer_replication import simulate
from composer_replication.simulation.simulation import Fault, SimulationError


def in_quorum(replica, k):
    """What a function of a replica returns in a quorum of k groups."""

    def asked(sim):
        sim.manager.start_quorum()
        return replica(sim)

    return simulate(asked, num_replicas=k)


@pytest.mark.parametrize(("reduce_op", "expected"), [(ReduceOp.AVG, 2.0), (ReduceOp.SUM, 6.0)])
def test_the_allreduce_averages_and_sums(reduce_op, expected):
    def replica(sim):
        tensor = torch.tensor([1.0 + sim.replica_id])
        finished = sim.manager.allreduce(tensor, reduce_op=reduce_op).wait()
        return tensor.item(), finished, sim.manager.should_commit(), sim.manager.current_step()

    assert in_quorum(replica, 3) == [(expected, True, True, 1)] * 3


def test_allreduces_started_one_after_the_other_are_waited_for_in_any_order():
    def replica(sim):
        tensors = [torch.tensor([float(sim.replica_id * 10 + i)]) for i in range(3)]
        works = [sim.manager.allreduce(t, reduce_op=ReduceOp.SUM) for t in tensors]
        for index in (2, 0, 1):
            works[index].wait()
        return [t.item() for t in tensors]

    assert in_quorum(replica, 2) == [[10.0, 12.0, 14.0]] * 2


def test_a_sum_is_bitwise_repeatable():
    def replica(sim):
        generator = torch.Generator().manual_seed(sim.replica_id)
        tensor = torch.randn(1000, generator=generator) * 10.0**sim.replica_id
        sim.manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        return tensor.tolist()

    first, *others = (each for _ in range(3) for each in in_quorum(replica, 5))
    assert all(other == first for other in others)


def test_an_exception_in_one_replica_ends_all_and_says_which():
    def replica(sim):
        if sim.replica_id == 1:
            raise ZeroDivisionError("by design")
        sim.manager.start_quorum()  # would wait for replica 1 for ever

    with pytest.raises(SimulationError, match="replica 1 raised ZeroDivisionError: by design") as e:
        simulate(replica, num_replicas=3)
    assert isinstance(e.value.__cause__, ZeroDivisionError)


@pytest.mark.slow
def test_a_peer_that_never_comes_is_a_timeout():
    def replica(sim):
        if sim.replica_id == 0:
            sim.manager.start_quorum()
        threading.Event().wait(1.0)

    with pytest.raises(SimulationError, match="no quorum within timeout_s=0.2"):
        simulate(replica, num_replicas=2, timeout_s=0.2)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: simulate(print, num_replicas=0), "num_replicas=0: use an integer of at least 1"),
    (lambda: simulate(print, num_replicas=2, faults=[Fault("kill", 2, 0)]),
     "replicas 0 to 1"),
    (lambda: Fault("explode", 0, 0), "kind='explode': use kill or kill_before"),  # pyright: ignore
])  # fmt: skip
def test_bad_scripts_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
