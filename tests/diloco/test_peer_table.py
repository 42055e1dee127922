"""What travels beside a sync: who took part, who goes on, what each one holds.

``pytest tests/diloco/test_peer_table.py``: simulated network, traces computed by hand.
"""

import math

import pytest
import torch
from common import Constant, plain_sgd, run_scripted, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.outer_health import Vitals
from composer_replication.diloco.peer_row import PeerRow, as_number
from composer_replication.diloco.peer_table import DivergenceError
from composer_replication.diloco.sample_ledger import SyncedSamples
from composer_replication.simulation.simulation import Fault, SimulationError

# ---- a row ----------------------------------------------------------------------------------


def test_a_row_is_read_as_it_was_sent():
    row = PeerRow(
        has_more=True,
        is_joining=False,
        was_healed=True,
        is_replacing=False,
        outer_step=2**40,
        vitals=Vitals(2.0**23, 2.0**-70, 2.0**-9, 2.0**60, 2.0**20, math.inf),
        samples=SyncedSamples(2**43 + 5, 2**40 + 2**22 - 1, 2**44 - 1),
        batches=as_number("f" * 64),
        digests=(as_number("0" * 64), 0),
    )
    with pytest.raises(ValueError, match="its row in the peer table has usual_pace=inf"):
        PeerRow.decode(row.encode(), 2)
    row = row._replace(vitals=row.vitals._replace(usual_pace=2.0**-30))
    assert PeerRow.decode(row.encode(), 2) == row


# ---- the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {"sync_every": 4},
    {"sync_every": 4, "fragment_patterns": ["a", "b"]},
    {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
    {"sync_every": 4, "weight_by": "steps"},
])  # fmt: skip
@pytest.mark.parametrize("steps", [(4, 5), (5, 4), (8, 9), (3, 11), (1, 2), (6, 6)])
def test_groups_of_unequal_lengths_end_on_the_same_global_parameters(settings, steps):
    def replica(sim):
        model = Constant(a=(2,), b=(3,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), **settings) as diloco:
            for _ in range(steps[sim.replica_id]):
                take_step(inner, -1.0 - sim.replica_id)
            diloco.final_sync()
            return diloco.global_digest(), diloco.outer_step, model.a.tolist(), model.b.tolist()

    first, second = simulate(replica, num_replicas=2)
    assert first == second
    assert first[2][0] < 10 and first[3][0] < 10


def test_who_ends_first_contributes_its_rest_and_then_nothing():
    # Group 0 ends after 3 steps of -1, group 1 after 6 of -2; weighted by steps.
    def replica(sim):
        steps, move = ((3, -1.0), (6, -2.0))[sim.replica_id]
        return run_scripted(sim, move, steps, sync_every=2, weight_by="steps", final=True)[-1]

    after_2 = 10 - (2 * 2 + 2 * 4) / 4
    after_4 = after_2 - (1 * 1 + 2 * 4) / 3
    after_6 = after_4 - 4
    assert simulate(replica, num_replicas=2) == [(round(after_6, 5),) * 2] * 2


def test_a_last_step_that_is_expected_needs_no_further_sync():
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2) as diloco:
            for step in range(4):
                if step == 3:
                    diloco.expect_last_step()
                take_step(inner, -1.0)
            before = sim.manager.current_step()
            diloco.final_sync()
            return sim.manager.current_step() - before, model.weight.item()

    assert simulate(replica, num_replicas=2) == [(0, 6.0)] * 2


def test_a_group_that_joins_when_the_others_have_just_ended_trains_and_all_end_equal():
    # The others have nothing to send any more, so that nothing moves when it joins.
    def replica(sim):
        if sim.replica_id == 2:
            return run_scripted(sim, -4.0, 2, sync_every=2, final=True)
        return run_scripted(sim, -1.0, 4, sync_every=2, final=True)

    late = [Fault("late", replica_id=2, step=3)]  # after the cold start and two syncs
    first, second, joiner = simulate(replica, num_replicas=3, faults=late)
    assert first[-2] == (6.0, 6.0)
    assert first[-1] == second[-1] == joiner[-1] == (6.0 - 8.0,) * 2


# ---- who took part ---------------------------------------------------------------------------


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@pytest.mark.parametrize("stale", [0, 1, 2])
def test_a_quorum_id_used_twice_is_noticed_and_the_mean_is_right(stale, wire_format, caplog):
    # torchft sums two groups and divides by three: -4/3 instead of -2 (research).
    def replica(sim):
        move = (-1.0, -2.0, -3.0)[sim.replica_id]
        return run_scripted(sim, move, 4, sync_every=2, wire_format=wire_format)

    faults = [Fault("stale_quorum", replica_id=stale, step=1)]
    for trace in simulate(replica, num_replicas=3, faults=faults, timeout_s=20):
        assert [*trace[1], *trace[3]] == pytest.approx([6.0, 6.0, 2.0, 2.0], abs=1e-4)
    assert any("2 of the quorum's 3 replica groups" in r.message for r in caplog.records)


# ---- what each one holds ---------------------------------------------------------------------


def tampered(sim, groups, *, digest_every=1):
    """Train; after the first sync some groups' global parameters of fragment 1 change by a bit."""
    model = Constant(a=(2,), b=(3,))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {"fragment_patterns": ["a", "b"], "digest_every": digest_every}
    with DiLoCo(sim.manager, model, inner, plain_sgd(), 2, **settings) as diloco:
        for step in range(6):
            if step == 1 and sim.replica_id in groups:
                diloco.global_parameters()["b"][2] += 1e-6
            take_step(inner, -1.0)
        return diloco.outer_step


def test_a_group_that_differs_by_a_bit_leaves_and_is_named_with_the_fragment(caplog):
    def replica(sim):
        try:
            return tampered(sim, {1})
        except DivergenceError as error:
            return str(error)

    first, odd, third = simulate(replica, num_replicas=3)
    assert "replica groups 1 (by their rank" in odd
    assert "the global parameters of fragment=1" in odd
    assert first == third == 6  # the others lose nothing
    assert any("replica groups 1 (by" in r.message for r in caplog.records)


def test_two_groups_that_differ_both_stop_since_neither_is_known_to_be_right():
    with pytest.raises(SimulationError, match="replica groups 0, 1 .* differ in the global param"):
        simulate(lambda sim: tampered(sim, {1}), num_replicas=2)


def test_without_digests_no_one_pays_for_them_and_the_outer_step_is_still_compared():
    assert simulate(lambda sim: tampered(sim, {1}, digest_every=0), num_replicas=2) == [6, 6]

    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1) as diloco:
            diloco._state.outer_step += sim.replica_id
            take_step(inner, -1.0)

    with pytest.raises(SimulationError, match="differ in the outer step"):
        simulate(replica, num_replicas=2)


def test_after_a_heal_the_digests_are_compared_without_being_asked_for():
    # The joiner's copy of the state is spoilt on the way.

    def replica(sim):
        model = Constant(a=(2,), b=(3,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(sim.manager, model, inner, plain_sgd(), 2)
        if sim.replica_id == 2:
            heal = sim.manager._state_dict_fns["diloco"][0]

            def spoilt(state):
                heal(state)
                diloco.global_parameters()["b"][0] += 1e-6

            sim.manager._state_dict_fns["diloco"] = (spoilt, dict)
        with diloco:
            for _ in range(8):
                take_step(inner, -1.0)
            return diloco.outer_step

    def guarded(sim):
        try:
            return replica(sim)
        except DivergenceError as error:
            return str(error)

    late = [Fault("late", replica_id=2, step=3)]
    first, second, joiner = simulate(guarded, num_replicas=3, faults=late)
    assert first == second == 4
    assert "replica groups 2 (by" in joiner


# ---- min_replica_size ------------------------------------------------------------------------


def run_with_size(sim, min_replica_size):
    sim.manager._min_replica_size = min_replica_size
    return run_scripted(sim, -1.0, 8, sync_every=2)


def test_groups_that_start_with_unequal_min_replica_sizes_are_told_both():
    with pytest.raises(SimulationError, match="min_replica_size: 2 here, 1 there"):
        simulate(lambda sim: run_with_size(sim, 1 + sim.replica_id), num_replicas=2)


def test_a_resume_may_have_another_min_replica_size():
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2) as diloco:
            return diloco.state_dict()["settings"]

    assert all("min_replica_size" not in each for each in simulate(replica, num_replicas=2))
