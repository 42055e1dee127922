"""What one group sends wrongly stays in that group: the others leave it out by name and go on.

``pytest tests/diloco/test_guard.py``: simulated network, values computed by hand.
``tests/integration/test_guard.py`` has a group that lies over gloo.
"""

import math
import random
import threading

import pytest
import torch
from common import Constant, plain_sgd, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.outer_health import Vitals, beyond_all_others
from composer_replication.diloco.peer_row import PeerRow
from composer_replication.simulation.shared_buffer import Fault, SharedBuffer

MOVES = (-1.0, -1.5, -2.0)
STEPS, SICK = 12, range(5, 8)
"""Inner steps, each with a sync, and those in which the last group is sick."""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("composer_replication.diloco.retry.FIRST_PAUSE_S", 0.0)


def train(sim, *, is_sick=lambda step: False, times=1.0, **settings):
    """Sync every step: the global value after each, the contributions and the steps lost."""
    model = Constant(0.0, weight=(6,), other=(3,))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    settings = {"num_replicas": sim.num_replicas, "sync_every": 1} | settings
    with DiLoCo(sim.manager, model, inner, plain_sgd(), **settings) as diloco:
        for step in range(STEPS):
            sick = sim.replica_id == sim.num_replicas - 1 and step in SICK
            threading.current_thread().name = "liar" if sick else f"group {sim.replica_id}"
            take_step(inner, MOVES[sim.replica_id] * (times if sick else 1.0))
            seen.append(diloco.global_parameters()["weight"].amax().item())
        reports = diloco.pop_finished_syncs()
    return seen, [r.contribution for r in reports], sum(r.steps_lost for r in reports)


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


def lie_in_row(monkeypatch, field, value):
    encode = PeerRow.encode

    def lying(row):
        lies = row.vitals._replace(**{field: value}) if is_lying() else row.vitals
        return encode(row._replace(vitals=lies))

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


@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize(("where", "at", "value"), LIES.values(), ids=LIES)
def test_what_is_sent_wrongly_leaves_its_group_out_by_name(
    where, at, value, groups, monkeypatch, caplog
):
    where(monkeypatch, at, value)
    check_left_out(simulate(train, num_replicas=groups), caplog, groups)


@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@pytest.mark.parametrize("groups", [2, 3])
def test_a_pseudo_gradient_beyond_all_others_leaves_its_group_out(groups, wire_format, caplog):
    def replica(sim):
        return train(sim, times=40.0, wire_format=wire_format)

    check_left_out(simulate(replica, num_replicas=groups), caplog, groups, tolerance=0.05)
    assert "times as long per inner step as that of" in caplog.text


def test_nobody_copies_the_buffers_of_a_first_group_that_is_left_out(monkeypatch):
    lie_in_message(monkeypatch, 0, math.nan)

    def replica(sim):
        model = Constant(0.0, weight=(6,))
        model.register_buffer("count", torch.tensor(0))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        counts = []
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1, num_replicas=3) as diloco:
            for step in range(4):
                is_liar = (sim.replica_id, step) == (0, 2)
                threading.current_thread().name = "liar" if is_liar else f"group {sim.replica_id}"
                model.count += 666 if is_liar else 1
                take_step(inner, -1.0)
                counts.append(model.count.item())
            return counts, diloco.global_digest()

    runs = simulate(replica, num_replicas=3)
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] == [1, 2, 2, 3]


def test_a_group_that_stays_sick_leaves_and_the_others_go_on(monkeypatch):
    lie_in_message(monkeypatch, 0, math.nan)

    def replica(sim):
        try:
            return train(sim, max_sync_retries=1)
        except Exception as error:
            return str(error)

    first, second, sick = simulate(replica, num_replicas=3)
    assert "was not sound in 2 syncs in a row" in sick
    assert first == second and all(map(math.isfinite, first[0]))


# ---- no false alarm ---------------------------------------------------------------------------


def vitals(norm, steps=1, usual=math.nan, contribution=1.0):
    return Vitals(contribution, norm, sent_norm=norm, inner_steps=steps, usual_pace=usual)


@pytest.mark.parametrize(("groups", "found"), [
    ([vitals(1), vitals(1.2), vitals(11)], []),
    ([vitals(1), vitals(1.2), vitals(13)], [2]),
    ([vitals(1), vitals(1), vitals(1e30), vitals(1e30)], [2, 3]),
    ([vitals(0), vitals(0), vitals(1)], []),  # nothing to compare with
    ([vitals(1, 500), vitals(1, 500), vitals(0.5, 1)], []),  # few steps, and not far
    ([vitals(20, 500), vitals(1, 1), vitals(1, 1)], []),  # many steps
    ([vitals(1), vitals(0, contribution=0), vitals(50)], []),  # two, in their first sync
    ([vitals(1), vitals(50, usual=1)], [1]),
    ([vitals(1), vitals(50, usual=20)], []),
    ([vitals(1, usual=1), vitals(1)], []),
    ([vitals(50)], []),
], ids=str)  # fmt: skip
def test_a_group_is_compared_with_the_others_and_between_two_with_itself(groups, found):
    assert [*beyond_all_others(dict(enumerate(groups)))] == found


@pytest.mark.parametrize("wire_format", ["float32", "bfloat16", "int8", "fp4"])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("job", [
    {"num_fragments": 1, "sync_every": 4},
    {"fragment_patterns": ["a", "b"], "sync_every": 6, "fragment_sync_delay": 2},
    {"sync_every": 12, "schedule": [{"outer_step": 3, "sync_every": 1}]},
    {"sync_every": 4, "weight_by": "samples"},
], ids=str)  # fmt: skip
@pytest.mark.slow
def test_honest_groups_raise_no_alarm(job, groups, wire_format, caplog):
    # Noise of unlike size, a tensor that freezes, steps of nothing, a joiner, an early end.
    def replica(sim):
        model = Constant(0.5, a=(40, 9), b=(33,))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        noise = torch.Generator().manual_seed(sim.replica_id)
        with DiLoCo(sim.manager, model, inner, wire_format=wire_format, **job) as diloco:
            for _ in range(48 - sim.replica_id):
                model.a.requires_grad_(not 5 <= diloco.outer_step < 7)
                inner.param_groups[0]["lr"] = 0.0 if 7 <= diloco.outer_step < 9 else 0.01
                for p in model.parameters():
                    p.grad = torch.randn(p.shape, generator=noise) if p.requires_grad else None
                diloco.count_samples(8 + 5 * sim.replica_id)
                inner.step()
            diloco.final_sync()
            return diloco.global_digest()

    faults = [Fault("late", groups - 1, 3), Fault("restart", 0, 6)]
    assert len(set(simulate(replica, num_replicas=groups, faults=faults))) == 1
    assert not [text for text in caplog.messages if "not sound" in text or "leaves out" in text]


# ---- a bit flips ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", ["float32", "int8"])
@pytest.mark.parametrize("groups", [2, 3])
def test_a_bit_that_flips_in_what_is_sent_moves_nobody_further_than_a_step(
    wire_format, groups, monkeypatch
):
    flips, chance = 250, random.Random(0)
    flipped = []
    send = SharedBuffer.send

    def flipping(buffer, connection, number, replica_id, tensor):
        if replica_id == groups - 1 and threading.current_thread().name == "flips":
            threading.current_thread().name = "flipped"
            tensor = tensor.clone()
            flat = tensor.view(-1).view(torch.uint8)
            flat[chance.randrange(flat.numel())] ^= 1 << chance.randrange(8)
            flipped.append(number)
        send(buffer, connection, number, replica_id, tensor)

    monkeypatch.setattr(SharedBuffer, "send", flipping)

    def replica(sim):
        model = Constant(0.0, weight=(30,), other=(3,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"wire_format": wire_format, "max_sync_retries": 20}
        steps = []
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1, **settings) as diloco:
            before = torch.zeros(33)
            for _ in range(flips):
                if sim.replica_id == groups - 1:
                    # The table is sent first, then the messages: one of them is hit.
                    threading.current_thread().name = "flips"
                take_step(inner, MOVES[sim.replica_id])
                theta = torch.cat([t.view(-1) for t in diloco.global_parameters().values()])
                steps.append(float((theta - before).norm()))
                before = theta.clone()
            return steps, diloco.global_digest()

    runs = simulate(replica, num_replicas=groups)
    assert len(flipped) > flips - 5 and len({digest for _, digest in runs}) == 1
    longest = 2.5 * max(map(abs, MOVES)) * math.sqrt(33)
    assert max(max(steps) for steps, _ in runs) < longest
