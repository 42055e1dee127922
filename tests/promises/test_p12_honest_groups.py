"""P12: no honest group of a trained job is taken for sick, and a sick one is found in it.

``honest_jobs.py`` has what they train.
"""

import json
import math
from functools import partial

import pytest
import torch
from common import Constant, written
from harness.groups import Group, adamw, sgd
from harness.groups import run as run_groups
from promises.honest_jobs import KINDS, Job, Sickness, run, stop
from torch import nn

from composer_replication import simulate
from composer_replication.diloco.averaging.quantized_mean import QuantizedMean
from composer_replication.diloco.division import Division
from composer_replication.diloco.flat_chunks import Layout
from composer_replication.diloco.outer_health import UsualPace, learning_rate
from composer_replication.group.checkpoint import CheckpointLayout
from composer_replication.simulation import Fault


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("composer_replication.diloco.retry.FIRST_PAUSE_S", 0.0)


STEPS = {"weight_by": "steps"}
JOBS = {
    "cosine to 0": Job(1, 600, [20, 20, 10], schedule="cosine to 0", settings=STEPS),
    "warm-up from 0": Job(3, 100, [20, 2, 2], schedule="warm-up from 0, constant", settings=STEPS),
    "warm restarts": Job(4, 600, [10, 9, 9], schedule="cosine with restarts", settings=STEPS),
    "thaw": Job(5, 160, [20, 4, 4], model="deep", thaws_at=0.25, settings=STEPS),
    "loud inputs": Job(6, 60, [6] * 3, model="batch norm", loudness=[1, 1, 30]),
    "restart and resume": Job(
        7,
        120,
        [12, 12, 4],
        model="convolution",
        optimizer="SGD with momentum",
        schedule="warm-up from 0, cosine",
        settings=STEPS | {"num_fragments": 2, "wire_format": "int8"},
        faults=[Fault("restart", 2, 6)],
        resumes_at=0.8,
        loudness=[8, 10, 1],
    ),
    "late": Job(8, 120, [12] * 2, optimizer="SGD", faults=[Fault("late", 1, 6)], own_schedule=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_an_honest_group_is_not_left_out(job):
    outcome = run(job)
    assert (outcome.alarms, outcome.left) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 3])
def test_a_sick_group_is_named_within_two_syncs_also_after_a_resume(groups):
    # It is at the end of a schedule, where others have seen far longer steps.
    job = Job(9, 200, [10] * groups, schedule="linear to 0", resumes_at=0.9)
    stopped = stop(job)
    for kind in KINDS:
        sickness = Sickness(kind, groups - 1, 184)
        outcome = run(job, sickness, stopped)
        assert sickness.outer_step == 18 and sickness.was_named(outcome, 1), kind
        assert not outcome.left, kind


@pytest.mark.parametrize("groups", [2, 3])
def test_a_resumed_group_is_judged_by_what_was_usual_before(groups, caplog):
    # Fifty times as far as the others is too far for it, and not for a group in its first sync.
    def replica(sim, saved=None, move=-1.0):
        with Group(sim, saved=saved, sync_every=1) as group:
            group.step(move if group.is_last else -1.0)
            return group.save()

    simulate(partial(replica, move=-50.0), num_replicas=groups)
    assert "leaves out" not in caplog.text
    saved = simulate(replica, num_replicas=groups)
    simulate(lambda sim: replica(sim, saved[sim.replica_id], -50.0), num_replicas=groups)
    assert f"leaves out replica group {groups - 1}" in caplog.text


@pytest.mark.parametrize("groups", [2, 3])
def test_a_newcomer_that_moves_a_thousand_times_too_far_is_left_out_at_once(groups, caplog):
    def replica(group):
        seen = []
        for step in range(12):
            group.step(-1000.0 if group.is_last and step < 1 else -1.0)
            seen.append(group.theta[0])
        return seen

    late = Fault("late", groups - 1, 5)
    first, *_ = run_groups(groups, replica, late, sync_every=1)
    assert min(first) > -100
    assert f"leaves out replica group {groups - 1}" in caplog.text


def test_a_group_that_becomes_sick_little_by_little_is_left_out(caplog):
    def replica(group):
        for step in range(30):
            group.step(-(2.0 ** max(0, step - 10)) if group.is_last else -1.0)

    run_groups(3, replica, sync_every=1, max_sync_retries=100)
    assert "leaves out replica group 2" in caplog.text


def test_a_group_that_is_sick_after_a_thaw_is_compared_with_what_it_does_since(caplog):
    # The last layer, in which all have moved further before, is small beside what has thawed.
    def replica(group):
        rest, last = group.model.rest, group.model.last
        for step in range(20):
            last.grad = torch.ones_like(last)
            is_thawed = group.is_last and step >= 6
            rest.grad = torch.full_like(rest, 1e-2) if is_thawed else None
            if group.is_last and step == 12:
                rest.grad *= 1000
            group.inner.step()

    model = partial(Constant, 0.0, rest=(400,), last=(1,))
    run_groups(3, replica, model=model, sync_every=1)
    left_out = [text for text in caplog.messages if "leaves out" in text]
    assert len(left_out) == 3 and all("step 12 leaves out replica group 2" in t for t in left_out)


def test_a_learning_rate_that_jumps_is_no_excuse(caplog):
    def replica(group):
        for step in range(12):
            group.inner.param_groups[0]["lr"] = 1000.0 if group.is_last and step == 9 else 1.0
            group.step(-1.0)

    run_groups(2, replica, sync_every=1)
    assert "leaves out replica group 1" in caplog.text


def test_a_counting_buffer_hides_no_group_that_moves_too_far(caplog):
    def model():
        made = Constant(0.0)
        made.register_buffer("steps", torch.zeros(()))
        return made

    def replica(group):
        for step in range(8):
            group.model.steps += 1e4
            group.step(-1000.0 if group.is_last and step == 5 else -1.0)

    run_groups(3, replica, model=model, sync_every=1)
    assert "leaves out replica group 2" in caplog.text


def test_neither_buffers_nor_the_residual_nor_frozen_layers_count_as_moved():
    tensors = torch.full((4,), 2.0), torch.zeros(60), torch.full((9,), 100.0)
    share = Division(tensors)
    layout = Layout(share, tensors, 2)
    mean = QuantizedMean(layout, wire_format="fp4")
    mean.residual += 50.0
    mean.pack(written(tensors), 1.0)
    assert (mean.moved, mean.moved_each) == (4.0, 2.0)
    assert mean.norm > 300 and mean.sent_norm > mean.norm


def test_a_fragment_that_only_one_group_has_needed_so_far_raises_no_alarm(caplog):
    # The others' samples do not need this expert: weight decay alone moves it there.
    def replica(group):
        used, other = group.model.a, group.model.b
        for step in range(40):
            if group.is_last and step >= 20:
                used, other = group.model.b, group.model.a
            used.grad, other.grad = torch.ones_like(used), torch.zeros_like(other)
            group.inner.step()

    settings = {"model": partial(Constant, 0.5, a=(8,), b=(8,)), "inner": adamw, "sync_every": 4}
    run_groups(3, replica, fragment_patterns=["a", "b"], **settings)
    assert "leaves out" not in caplog.text


@pytest.mark.parametrize("size", [1e-18, 1e-24, 1e-30])
def test_a_pseudo_gradient_whose_squares_are_lost_raises_no_alarm(size, caplog):
    def replica(group):
        for _ in range(4):
            group.diloco.count_samples(10**6)
            group.step(size)

    run_groups(2, replica, model=lambda: Constant(0.0), sync_every=1, weight_by="samples")
    assert "not sound" not in caplog.text


# ---- what is usual ----------------------------------------------------------------------------


def test_what_is_usual_follows_the_learning_rate_up_to_the_highest_so_far():
    usual = UsualPace(2)
    assert math.isnan(usual.at(1.0))
    for pace in (1.0, 2.0, 900.0):
        usual.add(0, pace, 0.1)
    usual.add(1, 0.3, 0.1)
    usual.add(1, 0.0, 0.1)  # frozen
    assert usual.at(0.05) == pytest.approx(1.0)
    assert usual.at(0.1) == usual.at(100.0) == pytest.approx(2.0)
    resumed = UsualPace(2)
    resumed.load_state_dict(usual.state_dict())
    assert vars(resumed) == vars(usual)


def test_the_learning_rate_is_the_largest_and_1_where_there_is_none():
    optimizer = sgd([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": torch.tensor(0.5)})
    assert learning_rate(optimizer) == 0.5
    for group in optimizer.param_groups:
        group["lr"] = None
    assert learning_rate(optimizer) == 1.0


def test_it_is_in_a_host_s_checkpoint():
    def train(sim, saved=None):
        group = Group(sim, sync_every=2)
        live = dict(group.model.named_parameters())
        layout = CheckpointLayout([live], group.diloco.settings, False, False)
        if saved is not None:
            group.model.load_state_dict(saved["local"])
            group.diloco.load_state_dict(layout.unpack(saved)[0])
        resumed = group.diloco.state_dict()
        with group:
            group.step(-1.0, -1.0)
        return layout.pack(group.diloco.state_dict(), live, live.__getitem__), resumed

    ((saved, _),) = simulate(train, num_replicas=1)
    pace = {"paces": [[1.0]], "top_lr": 1.0}
    assert json.loads(saved["progress"])["usual_pace"] == pace
    ((_, resumed),) = simulate(partial(train, saved=saved), num_replicas=1)
    assert resumed["usual_pace"] == pace
