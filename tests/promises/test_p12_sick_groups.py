"""P12: one sick group does not infect the rest: the others leave it out by name and go on.

``tests/integration/test_guard.py`` has a group that lies over gloo.
"""

import math
import random
import threading
from functools import partial

import pytest
import torch
from common import Constant, plain_sgd
from harness.groups import adamw, attempt, run

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.outer_health import GroupMetrics, beyond_all_others
from composer_replication.diloco.peer_rows import PeerRow
from composer_replication.simulation.shared_buffer import Fault, SharedBuffer

MOVES = (-1.0, -1.5, -2.0)
STEPS, SICK = 12, range(5, 8)
"""Inner steps, each with a sync, and those in which the last group is sick."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("composer_replication.diloco.retry.FIRST_PAUSE_S", 0.0)


def train(group, *, times=1.0):
    """Sync every step: the global value after each, the contributions and the steps lost."""
    seen = []
    for step in range(STEPS):
        sick = group.is_last and step in SICK
        threading.current_thread().name = "liar" if sick else f"group {group.id}"
        group.step(MOVES[group.id] * (times if sick else 1.0))
        seen.append(group.diloco.global_parameters()["weight"].amax().item())
    return seen, group.of_reports("contribution"), sum(group.of_reports("steps_lost"))


def trained(k, replica=train, **settings):
    model = partial(Constant, 0.0, weight=(6,), other=(3,))
    settings = {"model": model, "outer": plain_sgd(), "sync_every": 1} | settings
    return run(k, replica, num_replicas=k, **settings)


def is_lying():
    return threading.current_thread().name == "liar"


def damage_row(monkeypatch, at, bits):
    encode = PeerRow.encode

    def damaging(row):
        sent = bytearray(encode(row))
        if is_lying():
            sent[at] ^= bits
        return bytes(sent)

    monkeypatch.setattr(PeerRow, "encode", damaging)


def empty_row(monkeypatch, at, bits):
    encode = PeerRow.encode
    monkeypatch.setattr(
        PeerRow, "encode", lambda row: encode(row) if not is_lying() else bytes(len(encode(row)))
    )


def lie_in_row(monkeypatch, field, value):
    encode = PeerRow.encode

    def lying(row):
        lies = row.metrics._replace(**{field: value}) if is_lying() else row.metrics
        return encode(row._replace(metrics=lies))

    monkeypatch.setattr(PeerRow, "encode", lying)


def lie_in_message(monkeypatch, at, value):
    send, gather = WeightedMean.send, WeightedMean.find_unsound

    def lying(original):
        def call(mean, *arguments):
            if is_lying():
                mean.messages[at][0] = value
            return original(mean, *arguments)

        return call

    monkeypatch.setattr(WeightedMean, "send", lying(send))
    monkeypatch.setattr(WeightedMean, "find_unsound", lying(gather))


LIES = {
    "damaged flag": (damage_row, 0, 2),
    "damaged step": (damage_row, 4, 64),
    "damaged digest": (damage_row, -8, 255),
    "damaged checksum": (damage_row, -1, 5),
    "zeros": (empty_row, 0, 0),
    "contribution": (lie_in_row, "contribution", -1.0),
    "norm": (lie_in_row, "norm", math.nan),
    "steps": (lie_in_row, "inner_steps", math.inf),
    "NaN": (lie_in_message, 0, math.nan),
    "infinity": (lie_in_message, 0, math.inf),
    "huge": (lie_in_message, 0, 1e30),
    "weight": (lie_in_message, -1, 1e30),
    "negative weight": (lie_in_message, -1, -1.999),
    "weight of NaN": (lie_in_message, -1, math.nan),
}


def check_left_out(runs, caplog, groups, tolerance=1e-5):
    """The others average without the sick group, which is back in its first healthy sync."""
    value, expected = 0.0, []
    for step in range(STEPS):
        counted = MOVES[: groups - 1] if step in SICK else MOVES[:groups]
        value += sum(counted) / len(counted)
        expected.append(value)
    for number, (seen, contributions, lost) in enumerate(runs):
        assert seen == pytest.approx(expected, abs=tolerance)
        is_sick = number == groups - 1
        assert contributions == [0.0 if is_sick and n in SICK else 1.0 for n in range(STEPS)]
        assert lost == (len(SICK) if is_sick else 0)
    name = f"leaves out replica group {groups - 1}, which takes over the global parameters"
    assert sum(name in text for text in caplog.messages) == groups * len(SICK)


@pytest.mark.parametrize("groups", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("where", "at", "value"), LIES.values(), ids=LIES)
def test_what_is_sent_wrongly_leaves_its_group_out_by_name(
    where, at, value, groups, monkeypatch, caplog
):
    where(monkeypatch, at, value)
    check_left_out(trained(groups), caplog, groups)


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@pytest.mark.parametrize("groups", [2, 3])
def test_a_pseudo_gradient_beyond_all_others_leaves_its_group_out(groups, wire_format, caplog):
    runs = trained(groups, partial(train, times=40.0), wire_format=wire_format)
    check_left_out(runs, caplog, groups, tolerance=0.05)
    assert "times as long per inner step as that of" in caplog.text


def test_nobody_copies_the_buffers_of_a_first_group_that_is_left_out(monkeypatch):
    lie_in_message(monkeypatch, 0, math.nan)

    def model():
        made = Constant(0.0, weight=(6,))
        made.register_buffer("count", torch.tensor(0))
        return made

    def replica(group):
        counts = []
        for step in range(4):
            is_liar = (group.id, step) == (0, 2)
            threading.current_thread().name = "liar" if is_liar else f"group {group.id}"
            group.model.count += 666 if is_liar else 1
            group.step(-1.0)
            counts.append(group.model.count.item())
        return counts, group.diloco.global_digest()

    runs = trained(3, replica, model=model)
    assert all(seen == runs[0] for seen in runs)
    assert runs[0][0] == [1, 2, 2, 3]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_group_that_stays_sick_leaves_and_the_others_go_on(retries, monkeypatch):
    lie_in_message(monkeypatch, 0, math.nan)

    first, second, sick = trained(3, attempt(train), max_sync_retries=retries)
    assert f"was not sound in {retries + 1} syncs in a row" in sick
    assert first == second and all(map(math.isfinite, first[0]))


def too_long_in_b(sick_steps):
    """Three groups, a fragment synced after each step; b after steps 1, 4, 7 and 10."""

    def replica(group):
        for step in range(12):
            for name, tensor in group.model.named_parameters():
                is_sick = (group.id, name) == (2, "b") and step in sick_steps
                tensor.grad = torch.full_like(tensor, 1e4 if is_sick else 1.0)
            group.inner.step()
            group.reports += group.diloco.pop_finished_syncs()
            if step == 7:
                parts = dict(group.model.named_parameters())
                kept = "".join(name for name in parts if parts[name] in group.inner.state)
        return group.of_reports("contribution", "steps_lost"), group.theta, kept

    return trained(
        3,
        attempt(replica),
        model=partial(Constant, 0.0, a=(2,), b=(2,), c=(2,)),
        inner=partial(torch.optim.SGD, lr=1.0, momentum=1e-9),
        fragment_patterns=["a", "b", "c"],
        sync_every=3,
        max_sync_retries=2,
    )


def test_too_long_in_one_fragment_costs_the_steps_of_that_fragment_alone():
    healthy, _, sick = too_long_in_b({7})
    moved = pytest.approx([-10.0, -11.0, -12.0])
    assert healthy == ([(1.0, 0)] * 12, moved, "abc")
    assert sick == ([(1.0, 0)] * 7 + [(0.0, 3)] + [(1.0, 0)] * 4, moved, "ac")


def test_a_group_leaves_that_stays_sick_in_one_fragment_while_the_others_are_sound():
    healthy, _, sick = too_long_in_b({4, 7, 10})
    assert "was not sound in 3 syncs in a row" in sick
    assert healthy[0] == [(1.0, 0)] * 12


# ---- not finite -------------------------------------------------------------------------------


def test_a_group_with_nan_contributes_nothing_and_recovers(caplog):
    # Research: groups at -1 and -1.5 a step; NaN in the second one's second round only.
    def replica(group):
        for step in range(6):
            group.step(math.nan if (group.id, step) == (1, 3) else (-0.5, -1.5)[group.id])
        return group.local, group.of_reports("contribution", "total_contribution")

    healthy, sick = run(2, replica, outer=plain_sgd(), sync_every=2)
    assert healthy == ([10 - 2 - 1 - 2], [(1, 2), (1, 1), (1, 2)])
    assert sick == ([10 - 2 - 1 - 2], [(1, 2), (0, 1), (1, 2)])
    assert any("not finite" in record.message for record in caplog.records)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_sick_in_one_inner_step_costs_one_contribution_whatever_the_fragments(delay):
    # Three fragments in turns of 3 steps; one gradient of group 1 is not a number.
    def replica(group):
        group.step(*(math.nan if (group.id, step) == (1, 11) else -0.1 for step in range(27)))
        return group.of_reports("contribution"), sum(group.of_reports("steps_lost"))

    settings = {"fragment_patterns": ["a", "b", "c"], "fragment_sync_delay": delay}
    model = partial(Constant, a=(2,), b=(2,), c=(2,))
    settings |= {"model": model, "sync_every": 9, "max_sync_retries": 2}
    (healthy, lost_by_healthy), (sick, lost) = run(2, replica, **settings)
    assert (healthy, lost_by_healthy) == ([1.0] * 9, 0)
    assert sick.count(0.0) == 1 and len(sick) == 9
    assert 0 < lost <= 9 + delay  # at most a round


@pytest.mark.parametrize("announces", [True, False])
def test_steps_that_the_runs_last_sync_throws_away_are_reported(announces):
    def replica(group):
        group.step(-0.5, -0.5, math.nan)
        if announces:
            group.diloco.expect_last_step()
            group.step(-0.5)
        group.end()
        return group.of_reports("outer_step", "total_contribution", "steps_lost")

    steps = 2 if announces else 1
    assert run(2, replica, sync_every=2) == [[(1, 2, 0), (1, 0, steps)]] * 2


# ---- no false alarm ---------------------------------------------------------------------------


def metrics(moved, steps=1, usual=math.nan, contribution=1.0, elements=1):
    pace = moved / steps / math.sqrt(elements)
    return GroupMetrics(contribution, moved=moved, inner_steps=steps, pace=pace, usual_pace=usual)


@pytest.mark.parametrize(("groups", "found"), [
    ([metrics(1), metrics(1.2), metrics(11, usual=1)], []),
    ([metrics(1), metrics(1.2), metrics(13, usual=1)], [2]),
    ([metrics(1), metrics(1.2), metrics(13, usual=2)], []),  # the others have fallen behind
    ([metrics(1), metrics(1.2), metrics(119)], []),  # a warm-up from 0, and more steps
    ([metrics(1), metrics(1.2), metrics(121)], [2]),
    ([metrics(1), metrics(1), metrics(50, usual=1, elements=2500)], []),  # others have frozen
    ([metrics(1), metrics(1), metrics(500, usual=0.9, elements=2500)], [2]),
    ([metrics(1), metrics(1), metrics(1e30), metrics(1e30)], [2, 3]),
    ([metrics(0), metrics(0), metrics(1)], []),  # nothing to compare with
    ([metrics(1, 500), metrics(1, 500), metrics(0.5, 1)], []),  # few steps, and not far
    ([metrics(20, 500), metrics(1, 1), metrics(1, 1)], []),  # many steps
    ([metrics(1), metrics(0, contribution=0), metrics(50)], []),  # in their first sync
    ([metrics(1), metrics(1000)], [1]),
    ([metrics(1), metrics(50, usual=1)], [1]),
    ([metrics(1), metrics(50, usual=20)], []),
    ([metrics(1, usual=1), metrics(1)], []),
    ([metrics(50)], []),
], ids=str)  # fmt: skip
def test_a_group_is_compared_with_the_others_and_with_itself(groups, found):
    assert [*beyond_all_others(dict(enumerate(groups)))] == found


@pytest.mark.parametrize(
    ("groups", "wire_format"), [(2, "float32"), (3, "bfloat16"), (2, "int8"), (3, "fp4")]
)
@pytest.mark.parametrize("job", [
    {"num_fragments": 1, "sync_every": 4},
    {"fragment_patterns": ["a", "b"], "sync_every": 6, "fragment_sync_delay": 2},
    {"sync_every": 12, "schedule": [{"outer_step": 3, "sync_every": 1}]},
    {"sync_every": 4, "weight_by": "samples"},
], ids=str)  # fmt: skip
@pytest.mark.slow
def test_honest_groups_raise_no_alarm(job, groups, wire_format, caplog):
    # Noise of unlike size, a tensor that freezes, steps of nothing, a joiner, an early end.
    def replica(group):
        model, diloco = group.model, group.diloco
        noise = torch.Generator().manual_seed(group.id)
        for _ in range(48 - group.id):
            model.a.requires_grad_(not 5 <= diloco.outer_step < 7)
            group.inner.param_groups[0]["lr"] = 0.0 if 7 <= diloco.outer_step < 9 else 0.01
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=noise) if p.requires_grad else None
            diloco.count_samples(8 + 5 * group.id)
            group.inner.step()
        group.end()
        return diloco.global_digest()

    faults = [Fault("late", groups - 1, 3), Fault("restart", 0, 6)]
    settings = {"model": partial(Constant, 0.5, a=(40, 9), b=(33,)), "inner": adamw} | job
    assert len(set(run(groups, replica, *faults, wire_format=wire_format, **settings))) == 1
    assert not [text for text in caplog.messages if "not sound" in text or "leaves out" in text]


# ---- a bit flips ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "wire_format"), [(3, "float32"), (2, "int8")])
def test_a_bit_that_flips_in_what_is_sent_moves_nobody_further_than_a_step(
    groups, wire_format, monkeypatch
):
    flips, chance = 250, random.Random(0)
    flipped = []
    send = SharedBuffer.send

    def flipping(buffer, connection, replica_id, tensor):
        if replica_id == groups - 1 and threading.current_thread().name == "flips":
            threading.current_thread().name = "flipped"
            tensor = tensor.clone()
            flat = tensor.view(-1).view(torch.uint8)
            flat[chance.randrange(flat.numel())] ^= 1 << chance.randrange(8)
            flipped.append(connection.started[replica_id])
        return send(buffer, connection, replica_id, tensor)

    monkeypatch.setattr(SharedBuffer, "send", flipping)

    def replica(group):
        steps, before = [], torch.zeros(33)
        for _ in range(flips):
            if group.id == groups - 1:
                # The table is sent first, then the messages: one of them is hit.
                threading.current_thread().name = "flips"
            group.step(MOVES[group.id])
            theta = torch.cat([t.view(-1) for t in group.diloco.global_parameters().values()])
            steps.append(float((theta - before).norm()))
            before = theta.clone()
        return steps, group.diloco.global_digest()

    settings = {"model": partial(Constant, 0.0, weight=(30,), other=(3,)), "sync_every": 1}
    settings |= {"outer": plain_sgd(), "wire_format": wire_format, "max_sync_retries": 20}
    runs = run(groups, replica, **settings)
    assert len(flipped) > flips - 5 and len({digest for _, digest in runs}) == 1
    longest = 2.5 * max(map(abs, MOVES)) * math.sqrt(33)
    assert max(max(steps) for steps, _ in runs) < longest
