"""P2: after a commit all groups hold bitwise equal parameters, outer state and settings."""

import math
from functools import partial

import pytest
from common import Constant, plain_sgd
from harness.groups import STREAMING, Group, attempt, learn, run
from torch import nn

from composer_replication import __version__, simulate
from composer_replication.settings import SettingsMismatch
from composer_replication.simulation.simulation import Fault, SimulationError


@pytest.mark.parametrize("settings", [
    {},
    {"num_fragments": 3},
    {"num_fragments": 3, **STREAMING},
], ids=str)  # fmt: skip
def test_groups_hold_bitwise_equal_global_parameters_after_every_commit(settings):
    first, *others = learn(4, 24, sync_every=6, **settings)
    assert all(other == first for other in others)
    assert len(set(first.values())) == len(first) == 4 * settings.get("num_fragments", 1)


def test_the_cold_start_gives_every_group_the_first_ones_initial_parameters():
    def replica(sim):
        with Group(sim, Constant(10.0 + sim.replica_id), sync_every=2) as group:
            return group.local

    assert simulate(replica, num_replicas=3) == [[10.0]] * 3


def test_initial_parameters_that_are_not_finite_are_refused_before_any_group_takes_them():
    # Their mean would have no weight: each group would start from parameters of its own.
    def replica(sim):
        with Group(sim, Constant(math.inf if sim.replica_id == 0 else 1.0), sync_every=2):
            pass

    with pytest.raises(SimulationError, match="replica 0 raised ValueError: the initial parameter"):
        simulate(replica, num_replicas=2)


@pytest.mark.parametrize("own", [
    {"model": Constant(math.inf)},
    {"start_refusal": "it has begun", "num_replicas": 1},
], ids=["not finite", "refuses"])  # fmt: skip
def test_who_leaves_at_the_start_reports_it_and_nobody_waits_in_the_quorum(own):
    def replica(sim):
        is_first = sim.replica_id == 0
        said = attempt(Group(sim, **own if is_first else {"num_replicas": 1}).__enter__)()
        error = sim.manager.errored()
        return said == f"{type(error).__name__}: {error}" if is_first else error

    assert simulate(replica, num_replicas=2) == [True, None]


# ---- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [
    {},
    {"fragment_patterns": ["a", "b"]},
    {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
    {"weight_by": "steps"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("steps", [(4, 5), (5, 4), (8, 9), (3, 11), (1, 2), (6, 6)])
def test_groups_of_unequal_lengths_end_on_the_same_global_parameters(settings, steps):
    def replica(group):
        group.step(*[-1.0 - group.id] * steps[group.id])
        group.end()
        assert group.local == group.theta
        return group.diloco.global_digest(), group.diloco.outer_step, group.local

    model = partial(Constant, a=(2,), b=(3,))
    first, second = run(2, replica, model=model, outer=plain_sgd(), sync_every=4, **settings)
    assert first == second
    assert max(first[2]) < 10


def test_who_ends_first_contributes_its_rest_and_then_nothing():
    # Group 0 ends after 3 steps of -1, group 1 after 6 of -2; weighted by steps.
    def replica(group):
        group.step(*((-1.0,) * 3, (-2.0,) * 6)[group.id])
        group.end()
        return group.theta

    after_2 = 10 - (2 * 2 + 2 * 4) / 4
    after_4 = after_2 - (1 * 1 + 2 * 4) / 3
    ends = run(2, replica, outer=plain_sgd(), sync_every=2, weight_by="steps")
    assert ends == [[pytest.approx(after_4 - 4)]] * 2


def test_a_last_step_that_is_expected_needs_no_further_sync():
    def replica(sim):
        with Group(sim, outer=plain_sgd(), sync_every=2) as group:
            group.step(-1.0, -1.0, -1.0)
            group.diloco.expect_last_step()
            group.step(-1.0)
            before = sim.manager.current_step()
            group.end()
            return sim.manager.current_step() - before, group.local

    assert simulate(replica, num_replicas=2) == [(0, [6.0])] * 2


def test_a_group_that_joins_when_the_others_have_just_ended_trains_and_all_end_equal():
    # The others have nothing to send any more, so that nothing moves when it joins.
    def replica(group):
        group.step(*((-4.0,) * 2 if group.id == 2 else (-1.0,) * 4))
        before = group.theta
        group.end()
        return before, group.theta, group.local

    late = Fault("late", replica_id=2, step=3)  # after the cold start and two syncs
    first, second, joiner = run(3, replica, late, outer=plain_sgd(), sync_every=2)
    assert first[0] == [6.0]
    assert first[1:] == second[1:] == joiner[1:] == ([-2.0], [-2.0])


# ---- settings and models -----------------------------------------------------------------------


@pytest.mark.parametrize(("own", "differences"), [
    ([{"sync_every": 2, "outer": plain_sgd(0.7)}, {"sync_every": 4, "outer": plain_sgd(0.5)}],
     ["sync_every: 4 here, 2 there", "lr=0.5", "lr=0.7"]),
    ([{"schedule": [{"outer_step": n, "outer_lr": 0.1}]} for n in (2, 3)], ["schedule: [{"]),
    ([{"min_size": 1}, {"min_size": 2}], ["min_replica_size: 2 here, 1 there"]),
])  # fmt: skip
def test_groups_with_different_settings_do_not_start_and_the_error_lists_them(own, differences):
    with pytest.raises(SimulationError, match="replica 1 raised SettingsMismatch") as caught:
        run(2, lambda group: group.step(-1.0), own=own)
    assert isinstance(caught.value.__cause__, SettingsMismatch)
    assert all(each in str(caught.value) for each in differences)


def test_models_that_register_their_tensors_in_another_order_do_not_train_together():
    # Messages have no names: what is q here would be averaged with what is v there.
    shapes = [{name: (2,) for name in order} for order in ("qkv", "vkq")]
    own = [{"model": partial(Constant, **each)} for each in shapes]
    with pytest.raises(SimulationError, match="replica 1 raised .*\n?.*order_of_tensors: "):
        run(2, lambda group: group.step(-1.0), own=own)


def test_a_group_of_another_version_of_this_package_does_not_start():
    def replica(sim):
        group = Group(sim, sync_every=2)
        if sim.replica_id:
            sim.manager.settings["composer_replication"] = "0.0.1"
        return attempt(group.__enter__)()

    _, second = simulate(replica, num_replicas=2)
    assert f"composer_replication: '0.0.1' here, '{__version__}' there" in second


def test_the_first_tensor_in_which_models_differ_is_named_in_both_groups(caplog):
    def replica(sim):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + sim.replica_id))
        return attempt(Group(sim, model, sync_every=2).__enter__)()

    first, second = simulate(replica, num_replicas=2)
    assert isinstance(first, Group)
    there, here = "1.bias: '(3,) torch.float32'", "'(4,) torch.float32'"
    assert f"1.bias: {here} here, '(3,) torch.float32' there" in second
    assert "1.weight" not in second and "sha256" not in second
    assert f"{there} here, {here} there" in caplog.text, "the other group says so, and goes on"


# ---- what each one holds -----------------------------------------------------------------------

TWO = {"model": partial(Constant, a=(2,), b=(3,)), "fragment_patterns": ["a", "b"]}


def tampered(k, *, digest_every=1):
    """Train; after the first step group 1's global parameters of fragment 1 change by a bit."""

    def replica(group):
        def train():
            group.step(-1.0)
            if group.id == 1:
                group.diloco.global_parameters()["b"][2] += 1e-6
            group.step(*[-1.0] * 5)

        return attempt(train)() or group.diloco.outer_step

    return run(k, replica, digest_every=digest_every, sync_every=2, **TWO)


def test_a_group_that_differs_by_a_bit_leaves_and_is_named_with_the_fragment(caplog):
    first, odd, third = tampered(3)
    assert odd.startswith("DivergenceError") and "replica groups 1 (by their rank" in odd
    assert "the global parameters of fragment=1" in odd
    assert first == third == 6  # the others lose nothing
    assert any("replica groups 1 (by" in r.message for r in caplog.records)


def test_two_groups_that_differ_both_stop_since_neither_is_known_to_be_right():
    for text in tampered(2):
        assert "replica groups 0, 1 (by" in text and "differ in the global parameters" in text


def test_without_digests_nothing_is_compared():
    assert tampered(2, digest_every=0) == [6, 6]


def test_after_a_heal_the_digests_are_compared_without_being_asked_for():
    # The joiner's copy of the state is spoilt on the way: what its donor sends it is not equal.
    def replica(sim):
        register = sim.manager.register_state_dict_fn

        def registering(key, load, save):
            def spoilt(state):
                load(state)
                group.diloco.global_parameters()["b"][0] += 1e-6

            register(key, spoilt, save)

        if sim.replica_id == 2:
            sim.manager.register_state_dict_fn = registering
        group = Group(sim, sync_every=2, model=TWO["model"])

        def train():
            with group:
                group.step(*[-1.0] * 8)

        return attempt(train)() or group.diloco.outer_step

    late = Fault("late", replica_id=2, step=3)
    first, second, joiner = simulate(replica, num_replicas=3, faults=[late])
    assert first == second == 4
    assert "replica groups 2 (by" in joiner


def test_groups_that_differ_in_the_outer_step_find_out():
    def replica(sim):
        group = Group(sim, outer=plain_sgd(), sync_every=2, num_replicas=2)
        state = group.diloco.state_dict()
        state["outer_step"] = 2 + sim.replica_id
        group.diloco.load_state_dict(state)
        sim.manager.load_state_dict({"step": 3, "batches_committed": 6})
        with group:
            group.step(-1.0, -1.0)

    with pytest.raises(SimulationError, match="differ in the outer step"):
        simulate(replica, num_replicas=2)
