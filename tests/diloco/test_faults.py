"""Every scripted fault: the living lose nothing, nothing is counted twice, all end equal.

``pytest tests/diloco/test_faults.py``: simulated network, means computed by hand.
"""

import math

import pytest
import torch
from common import Constant, run_scripted, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.algorithm import SyncError
from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.simulation.simulation import Fault

MOVES = (-1.0, -2.0, -6.0)
ALL, TWO = (
    2 * 3.0,
    2 * 1.5,
)  # what a round of 2 steps moves: the mean of three, and of the first two


def three(sim):
    return run_scripted(sim, MOVES[sim.replica_id], 6, sync_every=2, final=True)


@pytest.mark.parametrize(("kind", "counts"), [
    ("kill", False),  # dead before it sent anything
    ("kill_before_vote", True),  # its part had arrived
    ("kill_after_vote", True),
])  # fmt: skip
def test_survivors_of_a_death_keep_every_step_wherever_it_strikes(kind, counts):
    faults = [Fault(kind, replica_id=2, step=2)]  # in the second sync
    first, second, dead = simulate(three, num_replicas=3, faults=faults)
    assert dead is None
    after = [10 - ALL, 10 - ALL - (ALL if counts else TWO)]
    after.append(after[-1] - TWO)
    for trace in (first, second):
        assert [trace[i] for i in (1, 3, 5)] == [(x, x) for x in after]


def test_a_group_that_restarts_is_back_and_contributes_nothing_until_it_has_trained():
    def replica(sim):
        return run_scripted(sim, MOVES[sim.replica_id], 8, sync_every=2)

    faults = [Fault("restart", replica_id=2, step=2)]
    first, second, back = simulate(replica, num_replicas=3, faults=faults)
    # It dies in the second sync and is back in time for the retry, with nothing; then it counts.
    after = [10 - ALL, 10 - ALL - TWO, 10 - 2 * ALL - TWO, 10 - 3 * ALL - TWO]
    for trace in (first, second):
        assert [trace[i] for i in (1, 3, 5, 7)] == [(x, x) for x in after]
    assert back[1] == (after[2],) * 2


@pytest.mark.parametrize("kind", ["kill_in_heal", "fail_heal"])
def test_a_heal_that_breaks_off_costs_the_healthy_nothing(kind):
    faults = [Fault("late", replica_id=2, step=3), Fault(kind, replica_id=2, step=3)]
    first, second, joiner = simulate(
        lambda sim: run_scripted(sim, MOVES[sim.replica_id], 8, sync_every=2),
        num_replicas=3,
        faults=faults,
    )
    after = [10 - n * TWO for n in (1, 2, 3)]
    for trace in (first, second):
        assert [trace[i] for i in (1, 3, 5)] == [(x, x) for x in after]
    assert (joiner is None) is (kind == "kill_in_heal")
    if joiner is not None:
        assert joiner[0][1] == after[2]  # it tried again, and stood where they stood


def test_a_donor_that_dies_in_the_heal_is_replaced_by_another():
    faults = [Fault("late", replica_id=2, step=3), Fault("kill", replica_id=0, step=3)]
    dead, second, joiner = simulate(
        lambda sim: run_scripted(sim, MOVES[sim.replica_id], 8, sync_every=2),
        num_replicas=3,
        faults=faults,
    )
    assert dead is None
    third_sync = 10 - 2 * TWO - 2 * 2  # the second group alone, with all its steps
    assert second[5] == (third_sync, third_sync)
    assert joiner[0][1] == third_sync
    assert second[7] == joiner[1] == (third_sync - 2 * 4.0,) * 2


@pytest.mark.parametrize("delay", [0, 1])
def test_the_commit_at_which_a_group_joins_is_bitwise_the_one_without_it(delay):
    def replica(sim):
        model = Constant(0.1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5 * (delay > 0)}
        digests = {}
        with DiLoCo(sim.manager, model, inner, None, 3, digest_every=1, **settings) as diloco:
            for step in range(12):
                take_step(inner, -0.1 / 3 * (sim.replica_id + 1) * math.sin(step + 1))
                digests |= {r.outer_step: r.global_digest for r in diloco.pop_finished_syncs()}
        return digests

    alone = simulate(replica, num_replicas=2)[0]
    late = [Fault("late", replica_id=2, step=3)]
    with_joiner = simulate(replica, num_replicas=3, faults=late)
    joined_at = min(with_joiner[2])
    assert joined_at == 3
    for outer_step in range(1, joined_at + 1):
        assert with_joiner[0][outer_step] == alone[outer_step]
    assert with_joiner[0][joined_at + 1] != alone[joined_at + 1]  # from then on it counts
    assert with_joiner[2][joined_at] == with_joiner[0][joined_at]


def test_a_group_that_is_sick_again_and_again_leaves_with_the_reason():
    def replica(sim):
        is_sick = sim.replica_id == 1
        try:
            return run_scripted(
                sim, math.nan if is_sick else -1.0, 12, sync_every=2, max_sync_retries=2
            )
        except SyncError as error:
            return str(error)

    healthy, sick = simulate(replica, num_replicas=2)
    assert "not sound in 3 syncs in a row" in sick
    assert healthy[-1] == (-2.0, -2.0)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_sick_in_one_inner_step_costs_one_contribution_whatever_the_fragments(delay):
    # Three fragments in turns of 3 steps; one gradient of group 1 is not a number.
    def replica(sim):
        model = Constant(a=(2,), b=(2,), c=(2,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"fragment_patterns": ["a", "b", "c"], "fragment_sync_delay": delay}
        with DiLoCo(sim.manager, model, inner, None, 9, max_sync_retries=2, **settings) as diloco:
            for step in range(27):
                take_step(inner, math.nan if (sim.replica_id, step) == (1, 11) else -0.1)
            reports = diloco.pop_finished_syncs()
            return [r.contribution for r in reports], sum(r.steps_lost for r in reports)

    (healthy, lost_by_healthy), (sick, lost) = simulate(replica, num_replicas=2)
    assert (healthy, lost_by_healthy) == ([1.0] * 9, 0)
    assert sick.count(0.0) == 1 and len(sick) == 9
    assert 0 < lost <= 9 + delay  # at most a round


def test_a_vote_that_fails_in_the_last_sync_ends_with_a_warning(caplog):
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, None, 2) as diloco:
            for step in range(4):
                if step == 3:
                    diloco.expect_last_step()
                take_step(inner, -1.0 - sim.replica_id)
            diloco.final_sync()
            return diloco.global_digest()

    faults = [Fault("fail_commit", replica_id=2, step=2)]
    first, second, odd = simulate(replica, num_replicas=3, faults=faults)
    assert first == second != odd
    (warning,) = (r for r in caplog.records if "the run's last sync" in r.message)
    assert warning.threadName == "replica_2"


def test_survivors_below_min_replica_size_wait_and_go_on_when_it_is_met_again():
    def replica(sim):
        sim.manager._min_replica_size = 2
        return run_scripted(sim, -1.0 - sim.replica_id, 6, sync_every=2, final=True)

    faults = [Fault("restart", replica_id=1, step=2)]
    first, back = simulate(replica, num_replicas=2, faults=faults)
    # The retry finds the other back, without steps: the first group's own count.
    assert [first[i] for i in (1, 3, 5)] == [(7.0, 7.0), (5.0, 5.0), (2.0, 2.0)]
    assert back[1] == (2.0, 2.0)
    assert (
        first[-1] == back[-1] == (-6.0, -6.0)
    )  # it stays, with nothing, until the other has ended


def test_waiting_for_min_replica_size_ends_when_it_is_told_to():
    def replica(sim):
        sim.manager._min_replica_size = 2
        return run_scripted(sim, -1.0, 6, sync_every=2, give_up_after_s=0.1)

    faults = [Fault("kill", replica_id=1, step=2)]
    with pytest.raises(Exception, match="1 replica groups are connected, and min_replica_size=2"):
        simulate(replica, num_replicas=2, faults=faults)


@pytest.mark.parametrize("delay", [0, 1])
def test_below_min_replica_size_nothing_is_formed_and_the_table_alone_is_sent(delay, monkeypatch):
    formed, sent = [], []
    form = FragmentSync._pseudo_gradient

    def noting_form(fragment, *tensors):
        formed.append(fragment._manager.num_participants())
        form(fragment, *tensors)

    monkeypatch.setattr(FragmentSync, "_pseudo_gradient", noting_form)

    def replica(sim):
        manager, start = sim.manager, sim.manager._start
        manager._min_replica_size = 2

        def noting_start(tensor, *arguments):
            if manager.current_step():  # those before the start are a few bytes
                sent.append((manager.num_participants(), tensor.numel() > 5))
            return start(tensor, *arguments)

        manager._start = noting_start
        alpha = 0.5 * (delay > 0)
        settings = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        return run_scripted(sim, -1.0, 6, sync_every=2, give_up_after_s=0.1, **settings)

    faults = [Fault("kill", replica_id=1, step=2)]
    with pytest.raises(Exception, match="1 replica groups are connected, and min_replica_size=2"):
        simulate(replica, num_replicas=2, faults=faults)
    row, message = True, False  # by their lengths: the model has one number
    assert {(2, row), (2, message), (1, row)} == set(sent)
    assert set(formed) == {2}


def test_a_start_with_fewer_than_min_replica_size_sends_no_parameters():
    sent = []

    def replica(sim):
        manager, start = sim.manager, sim.manager._start
        manager._min_replica_size = 2

        def noting_start(tensor, *arguments):
            sent.append(tensor.numel())
            return start(tensor, *arguments)

        manager._start = noting_start
        model = Constant(w=(50_000,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        awaited = {"num_replicas": 2, "start_timeout_s": 0.1, "on_start_timeout": "start"}
        DiLoCo(manager, model, inner, **awaited).__enter__()

    with pytest.raises(Exception, match="1 of 2 replica groups are connected, and min_replica_siz"):
        simulate(replica, num_replicas=1)
    assert sent and max(sent) < 50_000
