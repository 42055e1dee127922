"""The algorithm against traces computed by hand and against what it must be identical to.

``pytest tests/diloco/test_algorithm.py``: real torchft schedule, simulated network.
"""

import math
import warnings

import pytest
import torch
from common import Constant, TinyMLP, batch, mse, plain_sgd, run_scripted, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco import shards
from composer_replication.diloco.algorithm import SyncError
from composer_replication.settings import SettingsMismatch
from composer_replication.simulation.simulation import Fault, SimulationError


def train(sim, model, inner, steps, *, outer=None, num_samples=8, **settings):
    """Real gradients on the replica's own data; the digests after each outer step."""
    digests = []
    with DiLoCo(sim.manager, model, inner, outer, digest_every=1, **settings) as diloco:
        for step in range(steps):
            inner.zero_grad()
            mse(model, *batch(sim.replica_id, step, num_samples)).backward()
            inner.step()
            digests += [report.global_digest for report in diloco.pop_finished_syncs()]
    return digests


# ---- traces ------------------------------------------------------------------------------------


def test_two_rounds_with_nesterov_momentum_follow_the_trace_computed_by_hand():
    # Two groups move by -0.5 and -1.5 a step, two steps a round: pseudo-gradients 1 and 3, mean 2.
    # Nesterov, lr 0.5, momentum 0.5: buffer = 0.5 * buffer + 2; theta -= 0.5 * (2 + 0.5 * buffer).
    #   round 1: buffer 2,   theta 10 - 0.5 * (2 + 1)   = 8.5
    #   round 2: buffer 3,   theta 8.5 - 0.5 * (2 + 1.5) = 6.75
    def outer(parameters):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, nesterov=True)

    def replica(sim):
        move = (-0.5, -1.5)[sim.replica_id]
        return run_scripted(sim, move, 4, outer_optimizer=outer, sync_every=2)

    first, second = simulate(replica, num_replicas=2)
    assert first == [(9.5, 10.0), (8.5, 8.5), (8.0, 8.5), (6.75, 6.75)]
    assert second == [(8.5, 10.0), (8.5, 8.5), (7.0, 8.5), (6.75, 6.75)]


def test_streaming_with_delay_and_alpha_follows_the_trace_computed_by_hand():
    # One group, -1 a step, H=4, tau=2, alpha=0.5, outer lr 1. Round 1: delta formed at step 2 is
    # 10-8=2, applied at step 4: theta 8, local 0.5*6+0.5*8 = 7. Round 2: at step 6 local is 5,
    # delta 8-5=3, theta 5 at step 8, local 0.5*3+0.5*5 = 4.
    def replica(sim):
        return run_scripted(
            sim, -1.0, 8, sync_every=4, fragment_sync_delay=2, fragment_update_alpha=0.5
        )

    (trace,) = simulate(replica, num_replicas=1)
    expected = [(9, 10), (8, 10), (7, 10), (7, 8), (6, 8), (5, 8), (4, 8), (4, 5)]
    assert trace == [(float(local), float(theta)) for local, theta in expected]


def test_two_groups_that_stream_two_fragments_follow_the_trace_computed_by_hand():
    # Two inner steps a fragment: its pseudo-gradient is formed after the first of them and applied
    # after the second (delay 1), then local = 0.5 * local + 0.5 * global. Outer step: theta - mean.
    # Group 0 adds -1 a step, group 1 adds -3.
    #         theta of a, b   group 0: a, b   group 1: a, b
    # step 1  16, 16          15, 15          13, 13          form a: deltas 1, 3
    # step 2  14, 16          14, 14          12, 10          a: 16 - 2; 14 -> 14, 10 -> 12
    # step 3  14, 16          13, 13           9,  7          form b: deltas 3, 9
    # step 4  14, 10          12, 11           6,  7          b: 16 - 6; 12 -> 11, 4 -> 7
    # step 5  14, 10          11, 10           3,  4          form a: deltas 3, 11
    # step 6   7, 10         8.5,  9         3.5,  1          a: 14 - 7; 10 -> 8.5, 0 -> 3.5
    # final   b: deltas 1, 9, 10 - 5 = 5; then a, which has step 6: deltas -1.5, 3.5, 7 - 1 = 6
    def replica(sim):
        model = Constant(16.0, a=(), b=())
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
        with DiLoCo(
            sim.manager, model, inner, plain_sgd(), 4, fragment_patterns=["a", "b"], **settings
        ) as diloco:
            for _ in range(6):
                take_step(inner, -1.0 - 2 * sim.replica_id)
                yield [*diloco.global_parameters().values(), *model.parameters()]
            diloco.final_sync()
            yield [*diloco.global_parameters().values(), *model.parameters()]

    def trace(sim):
        return [[value.item() for value in values] for values in replica(sim)]

    ours, theirs = simulate(trace, num_replicas=2)
    theta = [(16, 16), (14, 16), (14, 16), (14, 10), (14, 10), (7, 10), (6, 5)]
    first = [(15, 15), (14, 14), (13, 13), (12, 11), (11, 10), (8.5, 9), (6, 5)]
    second = [(13, 13), (12, 10), (9, 7), (6, 7), (3, 4), (3.5, 1), (6, 5)]
    assert ours == [[*both, *own] for both, own in zip(theta, first, strict=True)]
    assert theirs == [[*both, *own] for both, own in zip(theta, second, strict=True)]


@pytest.mark.parametrize(
    ("delay", "alpha", "theta_after_8"), [(0, 0.0, 2.0), (2, 0.5, 5.0), (2, 1.0, 4.0)]
)
def test_delay_and_alpha_keep_the_share_of_the_steps_that_research_measured(
    delay, alpha, theta_after_8
):
    def replica(sim):
        return run_scripted(
            sim, -1.0, 8, sync_every=4, fragment_sync_delay=delay, fragment_update_alpha=alpha
        )

    (trace,) = simulate(replica, num_replicas=1)
    assert trace[-1][1] == theta_after_8


def test_a_delay_with_alpha_0_throws_the_overlapped_steps_away_and_says_so():
    def replica(sim):
        settings = {"fragment_sync_delay": 2, "fragment_update_alpha": 0}
        return run_scripted(sim, -1.0, 8, sync_every=4, **settings)

    with pytest.warns(UserWarning, match="fragment_update_alpha=0 throws away the 2 inner steps"):
        (trace,) = simulate(replica, num_replicas=1)
    assert trace[-1] == (6.0, 6.0)


def test_alpha_that_is_not_named_is_one_half_with_a_delay():
    def replica(sim, **alpha):
        return run_scripted(sim, -1.0, 8, sync_every=4, fragment_sync_delay=2, **alpha)

    named = simulate(lambda sim: replica(sim, fragment_update_alpha=0.5), num_replicas=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert simulate(replica, num_replicas=1) == named


def test_fragments_take_turns_from_the_first_one_after_a_cold_start():
    def replica(sim):
        model = torch.nn.Sequential(*(Constant() for _ in range(3)))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 6, num_fragments=3) as diloco:
            globals_after = []
            for _ in range(12):
                take_step(inner, -1.0)
                globals_after.append([t.item() for t in diloco.global_parameters().values()])
            reports = diloco.pop_finished_syncs()
        return [report.fragment for report in reports], globals_after

    ((turns, globals_after),) = simulate(replica, num_replicas=1)
    assert turns == [0, 1, 2, 0, 1, 2]
    assert globals_after[1] == [8, 10, 10]
    assert globals_after[3] == [8, 6, 10]
    assert globals_after[5] == [8, 6, 4]
    assert globals_after[11] == [2, 0, -2]


# ---- identities --------------------------------------------------------------------------------


def test_one_replica_with_outer_lr_1_and_no_momentum_is_the_inner_optimizer_alone():
    def replica(sim):
        model = TinyMLP()
        train(
            sim,
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            50,
            outer=plain_sgd(),
            sync_every=5,
        )
        return model

    (model,) = simulate(replica, num_replicas=1)
    plain = TinyMLP()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(50):
        optimizer.zero_grad()
        mse(plain, *batch(0, step)).backward()
        optimizer.step()
    assert largest_difference(model, plain) < 1e-6
    assert largest_difference(model, TinyMLP()) > 1e-2, "nothing was trained"


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_sync_every_step_with_sgd_is_data_parallel_training(num_replicas):
    def replica(sim):
        model = TinyMLP()
        train(
            sim,
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            20,
            outer=plain_sgd(),
            sync_every=1,
        )
        return model

    models = simulate(replica, num_replicas=num_replicas)
    parallel = TinyMLP()
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        parts = [batch(replica_id, step) for replica_id in range(num_replicas)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        mse(parallel, x, y).backward()
        optimizer.step()
    for model in models:
        assert largest_difference(model, parallel) < 1e-6
    assert largest_difference(parallel, TinyMLP()) > 1e-2, "nothing was trained"


def test_streaming_with_one_fragment_and_no_delay_is_bitwise_vanilla():
    def replica(sim, **settings):
        model = TinyMLP()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return train(sim, model, inner, 20, sync_every=5, **settings)

    vanilla = simulate(replica, num_replicas=2)
    streaming = simulate(
        lambda sim: replica(sim, num_fragments=1, fragment_sync_delay=0, fragment_update_alpha=0.0),
        num_replicas=2,
    )
    assert streaming == vanilla
    assert len(set(vanilla[0])) == 4


@pytest.mark.parametrize("settings", [
    {},
    {"num_fragments": 3},
    {"num_fragments": 3, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
])  # fmt: skip
def test_replicas_hold_bitwise_equal_global_parameters_after_every_commit(settings):
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return train(sim, model, inner, 24, sync_every=6, **settings)

    digests = simulate(replica, num_replicas=4)
    assert digests[0] == digests[1] == digests[2] == digests[3]
    assert len(set(digests[0])) == len(digests[0]) == 4 * settings.get("num_fragments", 1)


@pytest.mark.parametrize("bucket", [1, 10, 2**18])
def test_the_size_of_a_bucket_never_changes_a_bit(bucket, monkeypatch):
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return train(sim, model, inner, 10, sync_every=5)

    whole = simulate(replica, num_replicas=3)
    monkeypatch.setattr(shards, "BUCKET", bucket)
    assert simulate(replica, num_replicas=3) == whole


def test_the_loss_goes_down_with_the_default_outer_optimizer():
    def replica(sim):
        model = TinyMLP()
        before = mse(model, *batch(7, 0, 256)).item()
        train(sim, model, torch.optim.AdamW(model.parameters(), lr=1e-2), 40, sync_every=5)
        return before, mse(model, *batch(7, 0, 256)).item()

    for before, after in simulate(replica, num_replicas=2):
        assert after < 0.5 * before


# ---- weights, ends, failures -------------------------------------------------------------------


@pytest.mark.parametrize(("weight_by", "theta"), [
    ("uniform", 10 - (2 + 6) / 2),
    ("steps", 10 - (2 * 2 + 6 * 6) / 8),
    ("samples", 10 - (30 * 2 + 6 * 6) / 36),
    ("tokens", 10 - (60 * 2 + 600 * 6) / 660),
])  # fmt: skip
def test_unequal_groups_are_weighted_as_asked(weight_by, theta):
    # One group takes 2 steps of 15 samples of 2 tokens, the other 6 steps of 1 sample of 100
    # tokens, each step by -1.
    def replica(sim):
        steps, samples, tokens = ((2, 15, 30), (6, 1, 100))[sim.replica_id]
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        every = steps if weight_by != "uniform" else 6
        with DiLoCo(sim.manager, model, inner, plain_sgd(), every, weight_by=weight_by) as diloco:
            for _ in range(steps):
                diloco.count_samples(samples)
                diloco.count_tokens(tokens)
                take_step(inner, -1.0)
            if every != steps:
                diloco.final_sync()
            return diloco.global_parameters()["weight"].item()

    assert simulate(replica, num_replicas=2) == pytest.approx([theta, theta])


@pytest.mark.parametrize("counted", ["samples", "tokens"])
def test_weighting_by_what_nobody_counted_is_refused(counted):
    with pytest.raises(SimulationError, match=rf"no {counted} were counted: call count_{counted}"):
        simulate(
            lambda sim: run_scripted(sim, -1.0, 2, sync_every=2, weight_by=counted),
            num_replicas=1,
        )


@pytest.mark.parametrize("settings", [
    {"sync_every": 4},
    {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
])  # fmt: skip
@pytest.mark.parametrize("steps", [2, 3, 5, 8])
def test_a_final_sync_ends_every_group_on_the_same_global_parameters(settings, steps):
    def replica(sim):
        return run_scripted(sim, -1.0 - 2 * sim.replica_id, steps, final=True, **settings)

    first, second = simulate(replica, num_replicas=2)
    assert first[-1] == second[-1]
    local, theta = first[-1]
    assert local == theta < 10


def test_a_final_sync_in_mid_round_counts_every_step_once():
    trace = simulate(
        lambda sim: run_scripted(sim, -1.0, 7, sync_every=4, final=True), num_replicas=1
    )[0]
    assert trace[-1] == (3.0, 3.0)


def test_a_failed_sync_is_tried_again_and_loses_no_inner_step():
    # torchft drops the round: its survivor would stand at 8 instead of 6 after 4 steps.
    def replica(sim):
        return run_scripted(sim, -1.0, 4, sync_every=2)

    faults = [Fault("fail_allreduce", replica_id=1, step=1)]
    first, second = simulate(replica, num_replicas=2, faults=faults)
    assert first == second == [(9.0, 10.0), (8.0, 8.0), (7.0, 8.0), (6.0, 6.0)]


def test_survivors_of_a_death_in_mid_sync_keep_their_inner_steps():
    def replica(sim):
        return run_scripted(sim, (-1.0, -2.0, -6.0)[sim.replica_id], 4, sync_every=2)

    first, second, dead = simulate(
        replica, num_replicas=3, faults=[Fault("kill", replica_id=2, step=2)]
    )
    assert dead is None
    assert first[1] == (10 - 2 * 3.0,) * 2  # the mean of 1, 2 and 6, twice
    assert first[3] == second[3] == (4 - 2 * 1.5,) * 2  # the mean of 1 and 2


def test_a_group_whose_vote_failed_takes_over_what_its_peers_committed():
    def replica(sim):
        return run_scripted(sim, -1.0, 6, sync_every=2)[-1]

    faults = [Fault("fail_commit", replica_id=1, step=1)]
    healthy, failed = simulate(replica, num_replicas=2, faults=faults)
    # Its retry is its peer's second sync, so it is one sync behind at the end: same theta then.
    assert healthy == (4.0, 4.0)
    assert failed[1] in (4.0, 2.0)


def test_retries_end_with_an_error_that_says_why(caplog):
    def replica(sim):
        return run_scripted(sim, -1.0, 2, sync_every=2, max_sync_retries=2)

    faults = [Fault("fail_commit", replica_id=0, step=1)] * 3
    with pytest.raises(SimulationError, match="replica 0 raised SyncError") as caught:
        simulate(replica, num_replicas=1, faults=faults)
    assert isinstance(caught.value.__cause__, SyncError)
    assert "did not commit in 3 attempts" in str(caught.value)
    assert "scripted fault: fail_commit" in str(caught.value)
    assert [r.message[-21:] for r in caplog.records if "did not commit" in r.message] == [
        "trying again in 0.1 s", "trying again in 0.2 s", "trying again in 0.4 s",
    ]  # fmt: skip


def test_a_late_joiner_contributes_nothing_and_starts_level():
    # Two groups move by -1 and -3 a round; a third, by -5, joins their third sync.
    def replica(sim):
        model = Constant((10.0, 10.0, 99.0)[sim.replica_id])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2) as diloco:
            while diloco.outer_step < 4:
                take_step(inner, (-0.5, -1.5, -2.5)[sim.replica_id])
            reports = diloco.pop_finished_syncs()
            return [(r.outer_step, r.contribution, r.total_contribution) for r in reports], (
                model.weight.item()
            )

    first, second, joiner = simulate(
        replica, num_replicas=3, faults=[Fault("late", replica_id=2, step=3)]
    )
    assert joiner[0] == [(3, 0.0, 2.0), (4, 1.0, 3.0)]
    assert first[0][2] == (3, 1.0, 2.0)
    assert first[1] == second[1] == joiner[1] == 10 - 3 * 2 - 3


@pytest.mark.parametrize("delay", [0, 2])
def test_a_joiner_takes_as_many_steps_to_its_next_sync_as_its_peers(delay):
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(
            sim.manager, model, inner, plain_sgd(), 4,
            fragment_sync_delay=delay, fragment_update_alpha=0.5,
        ) as diloco:  # fmt: skip
            while diloco.outer_step < 5:
                take_step(inner, -1.0)
            return [r.inner_steps for r in diloco.pop_finished_syncs()]

    _, joiner = simulate(replica, num_replicas=2, faults=[Fault("late", replica_id=1, step=3)])
    assert joiner[:3] == [0, 4 + delay, 8 + delay]


def test_the_cold_start_gives_every_group_the_first_ones_initial_parameters():
    def replica(sim):
        model = Constant(10.0 + sim.replica_id)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, sync_every=2):
            return model.weight.item()

    assert simulate(replica, num_replicas=3) == [10.0, 10.0, 10.0]


def test_groups_with_different_settings_do_not_start_and_the_error_lists_them():
    def replica(sim):
        outer = plain_sgd(lr=0.7 if sim.replica_id == 0 else 0.5)
        return run_scripted(sim, -1.0, 4, sync_every=2 + 2 * sim.replica_id, outer_optimizer=outer)

    with pytest.raises(SimulationError, match="replica 1 raised SettingsMismatch") as caught:
        simulate(replica, num_replicas=2)
    assert isinstance(caught.value.__cause__, SettingsMismatch)
    assert "sync_every: 4 here, 2 there" in str(caught.value)
    assert "lr=0.5" in str(caught.value) and "lr=0.7" in str(caught.value)


def test_the_first_tensor_in_which_models_differ_is_named_in_both_groups(caplog):
    def replica(sim):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3 + sim.replica_id))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            with DiLoCo(sim.manager, model, inner, sync_every=2):
                return "started"
        except SettingsMismatch as error:
            return str(error)

    first, second = simulate(replica, num_replicas=2)
    assert first == "started"
    there, here = "1.bias: '(3,) torch.float32'", "'(4,) torch.float32'"
    assert f"1.bias: {here} here, '(3,) torch.float32' there" in second
    assert "1.weight" not in second and "sha256" not in second
    assert f"{there} here, {here} there" in caplog.text, "the other group says so, and goes on"


def test_a_group_with_nan_contributes_nothing_and_recovers(caplog):
    # Research: groups at -1 and -1.5 a step; NaN in the second one's second round only.
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.0)
        after = []
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2) as diloco:
            for step in range(6):
                nan = sim.replica_id == 1 and step == 3
                take_step(inner, math.nan if nan else (-0.5, -1.5)[sim.replica_id])
            after = [(r.contribution, r.total_contribution) for r in diloco.pop_finished_syncs()]
            return model.weight.item(), after

    healthy, sick = simulate(replica, num_replicas=2)
    assert healthy == (10 - 2 - 1 - 2, [(1, 2), (1, 1), (1, 2)])
    assert sick == (10 - 2 - 1 - 2, [(1, 2), (0, 1), (1, 2)])
    assert any("not finite" in record.message for record in caplog.records)


def largest_difference(model, other):
    return max(
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
