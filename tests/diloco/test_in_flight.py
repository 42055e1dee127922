"""Several fragments in flight: a trace by hand, an independent reference, and every fault.

``pytest tests/diloco/test_in_flight.py``: simulated network. The reference is in in_flight.py.
"""

import pytest
import torch
from common import Constant, plain_sgd, take_step
from in_flight import SCHEDULES, Reference, check, numbers, train

from composer_replication import DiLoCo, simulate
from composer_replication.simulation.simulation import Fault

schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def train_in(sim, schedule, steps, **more):
    return train(sim.manager, sim.replica_id, schedule, steps, **more)


def test_by_hand_a_sync_is_applied_two_turns_after_its_own():
    """H = P = 3, tau = 2: sent after steps 1, 2, 3, 4, applied after 3, 4, 5, 6."""

    def replica(sim):
        model = Constant(10.0, a=(1,), b=(1,), c=(1,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        trace = []
        settings = {"sync_every": 3, "fragment_patterns": ["a", "b", "c"]}
        more = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
        with DiLoCo(sim.manager, model, inner, plain_sgd(), **settings, **more) as diloco:
            for _ in range(5):
                take_step(inner, (-1.0, -3.0)[sim.replica_id])
                trace.append(numbers(diloco.global_parameters().values()))
        return trace, numbers(model.parameters())

    (trace, first), (_, second) = simulate(replica, num_replicas=2)
    assert trace[:2] == [[10.0, 10.0, 10.0]] * 2
    assert trace[2] == [8.0, 10.0, 10.0]  # the mean of what they moved a in one step
    assert trace[3] == [8.0, 6.0, 10.0]  # and b in two
    assert trace[4] == [8.0, 6.0, 4.0]
    # a: halfway between 7 and 8, or 1 and 8, after step 3, and then two steps more.
    assert first[0] == 7.5 - 2 and second[0] == 4.5 - 6


@schedules
def test_it_is_the_reference(schedule):
    results = simulate(lambda sim: train_in(sim, schedule, 43), num_replicas=3)
    for group, (trace, _, _) in enumerate(results):
        check(trace, Reference(schedule, 3), group)
    assert len({digest for _, digest, _ in results}) == 1


@schedules
@pytest.mark.parametrize("kind", ["kill", "kill_before_vote", "kill_after_vote"])
def test_survivors_of_a_death_keep_what_was_formed(schedule, kind):
    """Turn 7: what it votes on has the dead group's part, and what is in flight is sent again."""
    faults = [Fault(kind, replica_id=2, step=8)]
    results = simulate(lambda sim: train_in(sim, schedule, 43), num_replicas=3, faults=faults)
    assert results[2] is None
    turns = Reference(schedule, 3).turns
    for group in (0, 1):
        check(results[group][0], Reference(schedule, 3, {2: 8 - turns}), group)
    assert results[0][1] == results[1][1]


@pytest.mark.slow
@schedules
@pytest.mark.parametrize("kind", ["fail_allreduce", "stale_quorum"])
def test_a_turn_that_fails_in_all_groups_changes_nothing(schedule, kind):
    faults = [Fault(kind, replica_id=1, step=8)]
    results = simulate(lambda sim: train_in(sim, schedule, 43), num_replicas=3, faults=faults)
    for group, (trace, _, reports) in enumerate(results):
        check(trace, Reference(schedule, 3), group)
        # A broken connection fails what is sent next, and here all of that is sent again in time.
        assert sum(report.retries for report in reports) == (kind == "stale_quorum")
    assert len({digest for _, digest, _ in results}) == 1


@pytest.mark.slow
@schedules
def test_a_group_that_misses_a_commit_takes_over_from_the_others(schedule):
    faults = [Fault("fail_commit", replica_id=1, step=8)]
    results = simulate(lambda sim: train_in(sim, schedule, 43), num_replicas=3, faults=faults)
    assert len({digest for _, digest, _ in results}) == 1
    reports = results[1][2]
    assert sum(report.healed for report in reports) == 1
    # The others' syncs that were in flight have lost its part, and no more.
    turns = Reference(schedule, 3).turns
    assert sum(report.contribution == 0 for report in reports) <= turns + 2


@pytest.mark.slow
@schedules
@pytest.mark.parametrize("step", [1, 2, 3, 8, 9])
def test_a_joiner_comes_while_fragments_are_in_flight(schedule, step):
    """Also in the first turns, when fewer are in flight."""
    faults = [Fault("late", replica_id=2, step=step)]
    results = simulate(lambda sim: train_in(sim, schedule, 40), num_replicas=3, faults=faults)
    assert len({digest for _, digest, _ in results}) == 1
    alone = Reference(schedule, 2)
    turns = alone.turns
    joined_at = step - 1  # the turn of its quorum
    first_with_it = joined_at + 1
    steps = (first_with_it - turns) * alone.between if first_with_it > turns else 0
    check(results[0][0][:steps], alone, 0)
    assert results[2][2][0].contribution == 0 or joined_at < turns


@pytest.mark.slow
@schedules
def test_a_group_that_restarts_is_back_and_all_end_equal(schedule):
    faults = [Fault("restart", replica_id=2, step=8), Fault("kill", replica_id=1, step=12)]
    results = simulate(lambda sim: train_in(sim, schedule, 43), num_replicas=3, faults=faults)
    assert results[1] is None and results[0][1] == results[2][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill_in_heal", "fail_heal"])
@schedules
def test_a_heal_that_breaks_off_costs_the_healthy_nothing(schedule, kind):
    faults = [Fault("late", replica_id=2, step=8), Fault(kind, replica_id=2, step=8)]
    results = simulate(lambda sim: train_in(sim, schedule, 40), num_replicas=3, faults=faults)
    digests = {result[1] for result in results if result is not None}
    assert len(digests) == 1 and (results[2] is None) is (kind == "kill_in_heal")
    if kind == "kill_in_heal":
        for group in (0, 1):
            check(results[group][0], Reference(schedule, 2), group)


@pytest.mark.slow
@schedules
def test_groups_of_unequal_lengths_end_equal(schedule):
    results = simulate(
        lambda sim: train_in(sim, schedule, (43, 22, 31)[sim.replica_id]), num_replicas=3
    )
    assert len({digest for _, digest, _ in results}) == 1


@schedules
def test_alone_it_is_the_reference_too(schedule):
    ((trace, _, _),) = simulate(lambda sim: train_in(sim, schedule, 43), num_replicas=1)
    check(trace, Reference(schedule, 1), 0)


@pytest.mark.slow
@schedules
@pytest.mark.parametrize("num_groups", [2, 3])
@pytest.mark.parametrize("more", [
    {"wire_format": "int8"},
    {"wire_format": "fp4"},
], ids=str)  # fmt: skip
def test_in_every_wire_format_all_end_equal_and_near_the_mean(schedule, num_groups, more):
    """Near, since numbers are rounded."""
    faults = [Fault("fail_allreduce", 0, 6), Fault("late", num_groups, 11), Fault("kill", 1, 15)]
    whole = simulate(lambda sim: train_in(sim, schedule, 43, **more), num_replicas=num_groups)
    for group, (trace, _, _) in enumerate(whole):
        reference = Reference(schedule, num_groups)
        for _ in trace:
            reference.step()
        assert trace[-1][1] == pytest.approx(reference.theta, rel=0.2, abs=1.0), group
    results = simulate(
        lambda sim: train_in(sim, schedule, 43, **more), num_replicas=num_groups + 1, faults=faults
    )
    assert results[1] is None
    assert len({result[1] for result in results if result is not None}) == 1


@pytest.mark.slow
@schedules
def test_with_too_few_groups_nothing_is_formed_until_enough_are_back(schedule):
    def replica(sim):
        sim.manager._min_replica_size = 2
        return train_in(sim, schedule, 43)

    faults = [Fault("restart", replica_id=1, step=8)]
    results = simulate(replica, num_replicas=2, faults=faults)
    assert results[0][1] == results[1][1]
    (trace, _, reports), turns = results[0], Reference(schedule, 2).turns
    assert sum(report.steps_lost for report in reports) == 0
    check(trace[: 7 * Reference(schedule, 2).between], Reference(schedule, 2), 0)
    assert [report.outer_step for report in reports] == list(range(1, len(reports) + 1))
    assert len(reports) >= 43 // Reference(schedule, 2).between - turns
