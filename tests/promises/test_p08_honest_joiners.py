"""P8: a joiner takes the global state before it trains, contributes nothing, and starts level."""

import math

import pytest
import torch
from common import Constant, plain_sgd
from harness.groups import ALL, MOVES, TWO, Group, attempt, run, traces

from composer_replication import simulate
from composer_replication.simulation.simulation import Fault, SimulationError

LATE = Fault("late", replica_id=2, step=3)


def test_a_late_joiner_contributes_nothing_and_starts_level():
    # Two groups move by -1 and -3 a round; a third, by -5, joins their third sync.
    def replica(group):
        while group.diloco.outer_step < 4:
            group.step((-0.5, -1.5, -2.5)[group.id])
        return group.of_reports("outer_step", "contribution", "total_contribution"), group.local

    own = [{"model": Constant(value)} for value in (10.0, 10.0, 99.0)]
    first, second, joiner = run(3, replica, LATE, own=own, outer=plain_sgd(), sync_every=2)
    assert joiner[0] == [(3, 0.0, 2.0), (4, 1.0, 3.0)]
    assert first[0][2] == (3, 1.0, 2.0)
    assert first[1] == second[1] == joiner[1] == [10 - 3 * 2 - 3]


@pytest.mark.parametrize("delay", [0, 2])
def test_a_joiner_takes_as_many_steps_to_its_next_sync_as_its_peers(delay):
    def replica(group):
        while group.diloco.outer_step < 5:
            group.step(-1.0)
        return group.of_reports("inner_steps")

    late = Fault("late", replica_id=1, step=3)
    settings = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5}
    _, joiner = run(2, replica, late, sync_every=4, **settings)
    assert joiner[:3] == [0, 4 + delay, 8 + delay]


@pytest.mark.parametrize("delay", [0, 1])
def test_the_commit_at_which_a_group_joins_is_bitwise_the_one_without_it(delay):
    def replica(group):
        group.step(*(-0.1 / 3 * (group.id + 1) * math.sin(step + 1) for step in range(12)))
        return group.digests

    settings = {"sync_every": 3, "digest_every": 1, "fragment_sync_delay": delay}
    settings["model"] = lambda: Constant(0.1)
    alone = run(2, replica, **settings)[0]
    first, _, joiner = run(3, replica, LATE, **settings)
    assert min(joiner) == 3
    assert [first[n] for n in (1, 2, 3)] == [alone[n] for n in (1, 2, 3)]
    assert first[4] != alone[4]  # from then on it counts
    assert joiner[3] == first[3]


def test_a_group_that_restarts_is_back_and_contributes_nothing_until_it_has_trained():
    restart = Fault("restart", replica_id=2, step=2)
    *others, back = traces(3, MOVES, 8, restart, sync_every=2)
    # It dies in the second sync and is back in time for the retry, with nothing; then it counts.
    after = [10 - ALL, 10 - ALL - TWO, 10 - 2 * ALL - TWO, 10 - 3 * ALL - TWO]
    for seen in others:
        assert [seen[i] for i in (1, 3, 5, 7)] == [(x, x) for x in after]
    assert back[1] == (after[2],) * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill_in_heal", "fail_heal"])
def test_a_heal_that_breaks_off_costs_the_healthy_nothing(kind):
    broken = Fault(kind, replica_id=2, step=3)
    *others, joiner = traces(3, MOVES, 8, LATE, broken, sync_every=2)
    after = [10 - n * TWO for n in (1, 2, 3)]
    for seen in others:
        assert [seen[i] for i in (1, 3, 5)] == [(x, x) for x in after]
    assert (joiner is None) is (kind == "kill_in_heal")
    if joiner is not None:
        assert joiner[0][1] == after[2]  # it tried again, and stood where they stood


def test_a_donor_that_dies_in_the_heal_is_replaced_by_another():
    kill = Fault("kill", replica_id=0, step=3)
    dead, second, joiner = traces(3, MOVES, 8, LATE, kill, sync_every=2)
    assert dead is None
    third_sync = 10 - 2 * TWO - 2 * 2  # the second group alone, with all its steps
    assert second[5] == (third_sync, third_sync)
    assert joiner[0][1] == third_sync
    assert second[7] == joiner[1] == (third_sync - 2 * 4.0,) * 2


def test_a_donor_whose_inner_step_has_failed_can_still_be_read():
    def without_memory():
        raise torch.OutOfMemoryError

    def replica(sim):
        is_read = [True]  # torchft's donor fails each heal while its state is locked
        sim.manager.disallow_state_dict_read = lambda: is_read.append(False)
        sim.manager.allow_state_dict_read = lambda: is_read.append(True)
        with Group(sim, sync_every=2) as group:
            group.step(-1.0)
            with pytest.raises(torch.OutOfMemoryError):
                group.inner.step(without_memory)
            group.end()
            return is_read[-1]

    assert simulate(replica, num_replicas=1) == [True]


# ---- who may begin a run -----------------------------------------------------------------------

WHY = "The folder says that this run has made 57 outer steps"
BEGUN = {"step": 3, "batches_committed": 6}
"""The manager's state in a checkpoint after two outer steps."""


def resumed(sim, **settings):
    """Two steps of a group that has the run's state."""
    sim.manager.load_state_dict(BEGUN)
    settings = {"outer": plain_sgd(), "sync_every": 2, "num_replicas": 2} | settings
    with Group(sim, **settings) as group:
        group.step(-1.0, -1.0)
        return group.local


def test_a_group_with_nothing_in_a_run_that_has_begun_refuses_when_all_are_there():
    with pytest.raises(SimulationError, match=f"NothingToContinueFromError: .* run's state. {WHY}"):
        run(2, lambda group: None, num_replicas=2, start_refusal=WHY)


@pytest.mark.slow
def test_one_group_that_must_not_begin_holds_back_one_that_might():
    def replica(sim):
        own = ({"num_replicas": 3, "start_refusal": WHY}, {"num_replicas": 1})[sim.replica_id]
        return attempt(Group(sim, start_timeout_s=1.0, **own).__enter__)()

    first, second = simulate(replica, num_replicas=2)
    assert WHY in first and "no start within start_timeout_s=1" in first
    assert isinstance(second, Group) or "no start" in second


def test_a_group_that_must_not_begin_joins_one_that_has_the_state():
    def replica(sim):
        if sim.replica_id == 0:
            return resumed(sim)
        fresh = {"model": Constant(50.0), "num_replicas": 2, "start_refusal": WHY}
        with Group(sim, outer=plain_sgd(), sync_every=2, **fresh) as group:
            return group.local

    assert simulate(replica, num_replicas=2) == [[8.0], [10.0]]  # and not 50


@pytest.mark.slow
def test_groups_that_resume_wait_for_each_other():
    # The first would otherwise train by itself, and so would the second, without a word.
    late = [Fault("late", replica_id=1, step=3)]
    assert simulate(resumed, num_replicas=2, faults=late) == [[8.0]] * 2
    alone = [Fault("late", replica_id=1, step=99)]
    with pytest.raises(SimulationError, match="no start within start_timeout_s=1: 1 of 2"):
        simulate(lambda sim: resumed(sim, start_timeout_s=1), num_replicas=2, faults=alone)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_group_that_joins_in_the_last_sync_of_the_one_before_it_ends_with_the_same(step):
    # The first one was alone when it began its final sync, and stays for the one that has come.
    def replica(group):
        for _ in range(10):
            group.step(-1.0)
        group.end()
        return group.diloco.global_digest(), group.diloco.outer_step

    late = Fault("late", replica_id=1, step=step)
    first, second = run(2, replica, late, outer=plain_sgd(), sync_every=4, num_replicas=1)
    assert first == second
