"""P10: stopped anywhere and resumed is bitwise the uninterrupted run, with a sync in flight or not.

A group here stops after some step, throws its model, optimizer and DiLoCo away, and goes on from a
checkpoint.
"""

import re
from functools import partial

import pytest
import torch
from common import Buffered, Constant, TinyMLP
from harness.groups import Group, adamw, run

from composer_replication import simulate
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.simulation.simulation import SimulationError

STREAMING = {
    "sync_every": 8,
    "num_fragments": 2,
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.5,
}
LEARNING = {"model": Buffered, "inner": adamw, "outer": nesterov_sgd(0.7, 0.5), "digest_every": 1}
STEPS = 20
SCHEDULES = {
    "outer numbers": [
        {"outer_step": 3, "outer_lr": 0.25, "outer_momentum": 0.5},
        {"outer_step": 5, "outer_lr": 1, "outer_momentum": 0},
        {"outer_step": 7, "outer_lr": 0.5, "outer_momentum": 0.75},
    ],
    "short rounds": [{"outer_step": 4, "sync_every": 6}],
}


def end(group):
    """What a group holds at the end."""
    group.end()
    local = [tensor.tolist() for tensor in group.model.state_dict().values()]
    return group.diloco.global_digest(), local, group.diloco.inner_steps


def learn(group, first, last, announces):
    """Train, and announce the run's last inner step before it, as the trainers' callbacks do."""
    for step in range(first, last):
        if announces and step == STEPS - 1:
            group.diloco.expect_last_step()
        group.learn(step, step + 1)
        yield step + 1


def run_whole(settings, k=2, announces=False):
    """Train without a stop: how each group ends, and what it would have saved after each step."""

    def replica(group):
        saved = {done: group.save() for done in learn(group, 0, STEPS, announces)}
        return end(group), saved

    ends, saved = zip(*run(k, replica, num_replicas=k, **LEARNING | settings), strict=True)
    return [*ends], saved


def resumed(sim, saved, at, settings, *, until=STEPS, announces=False):
    """Go on, as a new process would, from what was saved after step ``at``."""
    settings = {"num_replicas": sim.num_replicas} | LEARNING | settings
    group = Group(sim, saved=saved[sim.replica_id][at], **settings)
    group.__enter__()
    for _ in learn(group, at, until, announces):
        pass
    return group


@pytest.fixture(scope="module")
def streaming():
    """What ``run_whole`` returns of ``STREAMING``."""
    return run_whole(STREAMING)


RESUMED = {
    "vanilla": {"sync_every": 4},
    "streaming": STREAMING,
    "int8": {"sync_every": 4, "wire_format": "int8"},
    "weighted": {"sync_every": 4, "weight_by": "steps"},
    "fragments": {"sync_every": 6, "num_fragments": 3},
    "nearly always in flight": {**STREAMING, "fragment_sync_delay": 3},
    "streaming in fp4": {**STREAMING, "wire_format": "fp4"},
    "in flight at the end": {"sync_every": 10, "fragment_sync_delay": 3}
    | {"fragment_update_alpha": 0.5},
}
for name, rows in SCHEDULES.items():
    scheduled = {"outer": None, "sync_every": 2, "schedule": rows}
    RESUMED |= {name: scheduled, f"{name}, overlapped": scheduled | {"fragment_sync_delay": 1}}


ANNOUNCED = {"vanilla", "int8", "streaming", "in flight at the end", "short rounds"}
ANNOUNCED |= {"nearly always in flight", "streaming in fp4"}
"""Where the last inner step is announced too. A sync is due then, or under way, with and without
what quantization has kept back; with "short rounds" the last step is amid a round. Stops long
before it are those of a run that announces nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "announces"),
    [
        pytest.param(settings, announces, id=f"{name}{', announced' * announces}")
        for name, settings in RESUMED.items()
        for announces in ([False, True] if name in ANNOUNCED else [False])
    ],
)
def test_stopped_after_any_step_and_resumed_is_bitwise_uninterrupted(settings, announces):
    ends, saved = run_whole(settings, announces=announces)
    first = STEPS - 9 if announces else 1
    for at in range(first, STEPS + 1):  # the last one is extended by nothing but the final sync
        replica = partial(resumed, saved=saved, at=at, settings=settings, announces=announces)
        assert simulate(lambda sim, go_on=replica: end(go_on(sim)), num_replicas=2) == ends


def test_one_group_in_flight_and_one_not_yet_are_bitwise_uninterrupted_too(streaming):
    # Both stand at the same outer step. The one in flight sends again what it had sent, when its
    # outer step is due; the other one gets there in its own time.
    ends, saved = streaming
    found = simulate(
        lambda sim: end(resumed(sim, saved, (7, 5)[sim.replica_id], STREAMING)), num_replicas=2
    )
    assert found == ends


def test_a_sync_in_flight_survives_being_saved_again_before_it_is_sent(streaming):
    ends, saved = streaming
    again = simulate(
        lambda sim: {7: resumed(sim, saved, 6, STREAMING, until=7).save()}, num_replicas=2
    )
    found = simulate(lambda sim: end(resumed(sim, again, 7, STREAMING)), num_replicas=2)
    assert found == ends


def test_a_group_whose_checkpoint_is_behind_takes_over_from_the_one_ahead(streaming):
    _, saved = streaming

    def replica(sim):
        at = (14, 6)[sim.replica_id]  # after outer steps 3 and 1, the second in flight
        group = resumed(sim, saved, at, STREAMING, until=at)
        joined_at = group.diloco.outer_step
        group.learn(at, 26)
        return joined_at, end(group)[0], group.diloco.outer_step

    first, second = simulate(replica, num_replicas=2)
    assert first == second and first[0] == 3


def test_more_groups_and_fewer_groups_resume(streaming):
    # A third one without anything takes over; a second one that is left out is not missed.
    _, saved = streaming

    def replica(sim):
        if sim.replica_id < 2:
            return end(resumed(sim, saved, 7, STREAMING))[0]
        with Group(sim, num_replicas=3, **LEARNING | STREAMING) as group:
            group.learn(7, STEPS)
            return end(group)[0]

    assert len(set(simulate(replica, num_replicas=3))) == 1
    simulate(lambda sim: end(resumed(sim, saved, 7, STREAMING)), num_replicas=1)


def test_groups_that_resume_with_other_global_parameters_find_out():
    # Two checkpoints of the same outer step that are not of the same run.
    _, saved = run_whole({"sync_every": 4})
    _, other = run_whole({"sync_every": 4, "weight_by": "steps", "outer": nesterov_sgd(0.3, 0.5)})

    def replica(sim):
        resumed(sim, (saved, other)[sim.replica_id], 8, {"sync_every": 4})

    differ = "DivergenceError: .* differ in the global parameters"
    with pytest.raises(SimulationError, match=differ):
        simulate(replica, num_replicas=2)


# ---- under other settings ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_buffers():
    """The same of a model without buffers, whose setting may then change too."""
    return run_whole(STREAMING | {"model": TinyMLP})


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "message"), [
    ({"outer": nesterov_sgd(0.4, 0.5)},
     r"outer_optimizer: 'SGD\(.*lr=0.7.*' before, 'SGD\(.*lr=0.4.*' now"),
    ({"sync_every": 12}, "sync_every: 8 before, 12 now"),
    ({"sync_every": 4, "fragment_sync_delay": 1}, "fragment_sync_delay: 2 before, 1 now"),
    ({"fragment_update_alpha": 0.0, "fragment_sync_delay": 0}, "alpha: 0.5 before, 0.0 now"),
    ({"weight_by": "steps"}, "weight_by: 'uniform' before, 'steps' now"),
    ({"sync_buffers": "none"}, "sync_buffers: 'mean' before, 'none' now"),
])  # fmt: skip
@pytest.mark.parametrize("stops_at", [7, 8, 9])
def test_changed_settings_are_adopted_and_logged(
    changed, message, stops_at, without_buffers, caplog
):
    _, saved = without_buffers
    settings = STREAMING | {"model": TinyMLP} | changed
    first, second = simulate(
        lambda sim: end(resumed(sim, saved, stops_at, settings)), num_replicas=2
    )
    assert first[0] == second[0] and first[2] == STEPS
    assert any(re.search(message, text) for text in caplog.messages)


@pytest.mark.parametrize(("lr", "is_still"), [(0.0, True), (0.7, False)])
def test_a_changed_outer_learning_rate_is_the_one_that_steps(lr, is_still):
    settings = {"sync_every": 4, "model": TinyMLP}
    _, saved = run_whole(settings | {"outer": nesterov_sgd(0.7, 0.0)}, k=1)

    def replica(sim):
        outer = {"outer": nesterov_sgd(lr, 0.0)}
        group = resumed(sim, saved, 4, settings | outer, until=4)
        before = group.diloco.global_digest()
        group.learn(4, 8)
        return before == group.diloco.global_digest(), group.diloco.outer_step

    assert simulate(replica, num_replicas=1) == [(is_still, 2)]


@pytest.mark.parametrize(("changed", "message"), [
    ({"num_fragments": 1}, "num_fragments: 1 here, 2 there"),
    ({"sync_buffers": "none"}, "sync_buffers: 'none' here, 'mean' there"),
    ({"weight_by": "samples"}, "weight_by: 'samples' here, 'uniform' there"),
])  # fmt: skip
def test_settings_that_the_state_does_not_allow_are_refused_with_both_values(
    changed, message, streaming
):
    _, saved = streaming
    with pytest.raises(
        SimulationError, match=f"SettingsMismatch: .* the checkpoint(.|\n)*{message}"
    ):
        simulate(lambda sim: resumed(sim, saved, 7, STREAMING | changed), num_replicas=1)


# ---- what is under way when it stops -----------------------------------------------------------


def test_frozen_in_flight_stopped_there_and_resumed_is_bitwise_uninterrupted():
    # Sent after inner step 6, frozen before step 7, stopped after it, applied after step 8.
    def train(group, steps):
        for step in steps:
            group.model.a.requires_grad_(step < 6)
            for p in group.model.parameters():
                numbers = torch.arange(p.numel()).view(p.shape) + step + group.id
                p.grad = torch.sin(numbers.float()) if p.requires_grad else None
            group.inner.step()
        return group.save() if steps[-1] == 6 else group.diloco.global_digest()

    settings = {"sync_every": 4, "fragment_sync_delay": 2, "wire_format": "int8", "num_replicas": 2}
    settings |= {
        "model": partial(Constant, a=(2, 3), b=(3,)),
        "inner": partial(torch.optim.SGD, lr=0.1),
    }
    whole = run(2, partial(train, steps=range(12)), **settings)
    saved = run(2, partial(train, steps=range(7)), **settings)
    own = [{"saved": each} for each in saved]
    assert run(2, partial(train, steps=range(7, 12)), own=own, **settings) == whole


def test_a_schedule_that_is_left_out_at_a_resume_leaves_nothing_behind(caplog):
    settings = {"sync_every": 2, "outer_lr": 0.5, "outer_momentum": 0.75}
    schedule = {"schedule": SCHEDULES["outer numbers"]}

    def begin(group):
        group.step(*[1.0] * 10)
        return group.save()

    def go_on(group):
        group.step(1.0, 1.0)
        return group.of_reports("outer_step", "outer_lr", "outer_momentum")

    (saved,) = run(1, begin, **settings | schedule)
    assert run(1, go_on, saved=saved, **settings) == [[(6, 0.5, 0.75)]]
    assert "schedule: [{'outer_step': 3" in caplog.text
