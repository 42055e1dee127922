"""The simulated network: it averages, keeps torchft's semantics and breaks as scripted."""

import pytest
import torch
from torch.distributed import ReduceOp

from composer_replication import simulate
from composer_replication.simulation.simulation import Fault, SimulationError


def average_once(sim, reduce_op=ReduceOp.AVG):
    sim.manager.start_quorum()
    tensor = torch.tensor([1.0 + sim.replica_id])
    finished = sim.manager.allreduce(tensor, reduce_op=reduce_op).wait()
    return tensor.item(), finished, sim.manager.should_commit(), sim.manager.current_step()


def test_the_allreduce_averages_and_sums():
    assert simulate(average_once, num_replicas=3) == [(2.0, True, True, 1)] * 3
    summed = simulate(lambda sim: average_once(sim, ReduceOp.SUM), num_replicas=3)
    assert summed == [(6.0, True, True, 1)] * 3


def test_results_come_back_in_the_order_of_the_replicas():
    assert simulate(lambda sim: sim.replica_id, num_replicas=8) == list(range(8))


def test_allreduces_started_one_after_the_other_are_waited_for_in_any_order():
    def replica(sim):
        sim.manager.start_quorum()
        tensors = [torch.tensor([float(sim.replica_id * 10 + i)]) for i in range(3)]
        works = [sim.manager.allreduce(t, reduce_op=ReduceOp.SUM) for t in tensors]
        for index in (2, 0, 1):
            works[index].wait()
        return [t.item() for t in tensors]

    assert simulate(replica, num_replicas=2) == [[10.0, 12.0, 14.0]] * 2


def test_a_sum_is_bitwise_repeatable():
    def replica(sim):
        generator = torch.Generator().manual_seed(sim.replica_id)
        tensor = torch.randn(1000, generator=generator) * 10.0**sim.replica_id
        sim.manager.start_quorum()
        sim.manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        return tensor

    runs = [simulate(replica, num_replicas=5) for _ in range(3)]
    for run in runs:
        for tensor in run:
            assert torch.equal(tensor, runs[0][0])


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
        else:
            import threading

            threading.Event().wait(1.0)

    with pytest.raises(SimulationError, match="no quorum within timeout_s=0.2"):
        simulate(replica, num_replicas=2, timeout_s=0.2)


def test_who_is_behind_takes_the_state_of_one_who_is_not():
    def replica(sim):
        held = {"value": sim.replica_id}
        sim.manager.register_state_dict_fn("held", held.update, lambda: dict(held))
        if sim.replica_id == 1:
            sim.manager.load_state_dict({"step": 7, "batches_committed": 0})
        sim.manager.start_quorum()
        return held["value"], sim.manager.current_step(), sim.manager.num_participants()

    assert simulate(replica, num_replicas=3) == [(1, 7, 3)] * 3


def test_a_scripted_kill_fails_the_allreduce_of_the_others_only_once():
    def replica(sim):
        return [average_once(sim)[1:3] for _ in range(2)]

    results = simulate(replica, num_replicas=3, faults=[Fault("kill", replica_id=0, step=0)])
    assert results == [None, [(False, False), (True, True)], [(False, False), (True, True)]]


def test_a_scripted_commit_failure_hits_one_replica():
    def replica(sim):
        return average_once(sim)[2]

    results = simulate(replica, num_replicas=2, faults=[Fault("fail_commit", 1, 0)])
    assert results == [True, False]


def test_a_late_replica_is_waited_for_once_its_time_has_come():
    def replica(sim):
        seen = []
        while sim.manager.current_step() < 4:
            average_once(sim)
            seen.append(sim.manager.num_participants())
        return seen

    early, late = simulate(replica, num_replicas=2, faults=[Fault("late", replica_id=1, step=2)])
    assert early == [1, 1, 2, 2]
    assert late == [2, 2]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: simulate(average_once, num_replicas=0), "num_replicas=0: use at least 1"),
    (lambda: simulate(average_once, num_replicas=2, faults=[Fault("kill", 2, 0)]),
     "replicas 0 to 1"),
    (lambda: Fault("explode", 0, 0), "kind='explode': use one of kill"),  # pyright: ignore
])  # fmt: skip
def test_bad_scripts_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
