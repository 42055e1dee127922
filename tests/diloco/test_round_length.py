"""Groups of unequal speed whose rounds are a time. Run: pytest tests/diloco/test_round_length.py.

Real torchft schedule, simulated network. A replica's clock goes on in its inner steps alone.
"""

import threading

import pytest
import torch
from common import Constant, TinyMLP, batch, mse, plain_sgd, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco import hang_watch
from composer_replication.diloco.outer_health import Vitals
from composer_replication.diloco.round_length import RoundLength
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault

SPEEDS = (1.0, 1.5, 3.0)
"""Seconds of an inner step, by replica."""


class Clock:
    """The time of the replica whose thread asks for it."""

    def __init__(self):
        self._own = threading.local()

    def monotonic(self):
        return getattr(self._own, "now", 0.0)

    def advance(self, seconds):
        self._own.now = self.monotonic() + seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hang_watch, "time", clock)
    return clock


def train(sim, clock, syncs, step_s=SPEEDS, **settings):
    """Move a scalar by -1 a step: contributions, lengths of rounds, global values after syncs."""
    model = Constant(10.0)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    reports, thetas = [], []
    with DiLoCo(sim.manager, model, inner, plain_sgd(), **settings) as diloco:
        while len(reports) < syncs:
            clock.advance(step_s[sim.replica_id])
            take_step(inner, -1.0)
            if new := diloco.pop_finished_syncs():
                reports += new
                thetas.append(round(diloco.global_parameters()["weight"].item(), 3))
    return [report.contribution for report in reports], [r.sync_every for r in reports], thetas


def test_groups_of_three_speeds_take_as_many_steps_as_the_fastest_ones_time_allows(clock):
    # Two rounds with the fewest steps, until all have measured and said their pace. Then the
    # fastest group takes sync_every=30 steps in 30 s, the others 20 and 10 in the same time. The
    # weighted mean of n steps that contribute n each: (900 + 400 + 100) / 60 = 23.333.
    def replica(sim):
        return train(sim, clock, 4, sync_every=30, round_seconds="auto", num_replicas=3)

    first, second, third = simulate(replica, num_replicas=3)
    assert first[:2] == ([3, 3, 30, 30], [3, 30, 30, 30])
    assert second[:2] == ([3, 3, 20, 20], [3, 20, 20, 20])
    assert third[:2] == ([3, 3, 10, 10], [3, 10, 10, 10])
    thetas = [7.0, 4.0, 4 - 70 / 3, 4 - 140 / 3]
    assert first[2] == second[2] == third[2] == pytest.approx(thetas, abs=1e-3)


def test_a_given_time_is_shared_by_the_fragments_and_bounded_by_sync_every(clock):
    # 20 s a round and two fragments: 10 steps, 6.67 and 3.33 in a turn, of at most 16 / 2 = 8.
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = {"sync_every": 16, "num_fragments": 2, "fragment_sync_delay": 1}
        with DiLoCo(
            sim.manager, model, inner, **settings, round_seconds=20, num_replicas=3
        ) as diloco:
            lengths = []
            while len(lengths) < 5:
                clock.advance(SPEEDS[sim.replica_id])
                mse(model, *batch(sim.replica_id, 0)).backward()
                inner.step()
                lengths += [report.sync_every for report in diloco.pop_finished_syncs()]
        return lengths

    assert simulate(replica, num_replicas=3) == [[16] * 5, [14] * 5, [6] * 5]


def test_a_group_that_becomes_slower_takes_fewer_steps_and_one_long_turn_changes_nothing(clock):
    def replica(sim):
        lengths = []
        speeds = [1.0, 1.0]
        model = Constant(10.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"sync_every": 20, "round_seconds": 12, "num_replicas": 2}
        with DiLoCo(sim.manager, model, inner, plain_sgd(), **settings) as diloco:
            while len(lengths) < 12:
                if sim.replica_id == 1:
                    speeds[1] = 5.0 if len(lengths) == 3 else 2.0 if len(lengths) > 6 else 1.0
                clock.advance(speeds[sim.replica_id])
                take_step(inner, -1.0)
                lengths += [report.sync_every for report in diloco.pop_finished_syncs()]
        return lengths

    same, slower = simulate(replica, num_replicas=2)
    assert same == [12] * 12
    # One turn took 5 s a step, which changes nothing; the second one of 2 s a step does.
    assert slower == [12] * 8 + [6] * 4


@pytest.mark.parametrize(
    ("measured", "pace"),
    [
        ([2.0], 2.0),
        ([2.0, 4.0], 3.0),
        ([1.0, 1.0, 1.0, 9.0], 1.0),  # an evaluation
        ([1.0, 1.0, 1.0, 9.0, 1.0], 1.0),
        ([1.0, 1.0, 1.0, 3.0, 4.0], 3.0),  # slower
        ([4.0, 4.0, 4.0, 1.0, 2.0], 2.0),  # faster
        ([1.0, 1.3, 1.1, 1.0, 1.2], 1.1),  # as it varies: the median
        ([9.0, 1.0, 1.0, 1.0, 2.0, 3.0], 2.0),  # the last five count
    ],
)
def test_the_pace_is_the_median_unless_the_last_two_turns_say_otherwise(measured, pace):
    length = RoundLength(DiLoCoSettings())
    for step_s in measured:
        length.measure(step_s)
    assert length.step_s == pytest.approx(pace)


def test_a_joiner_begins_with_the_steps_of_the_slowest_group_and_then_takes_its_share(clock):
    def replica(sim):
        settings = {"sync_every": 10, "round_seconds": "auto", "num_replicas": 2}
        return train(sim, clock, 8 - 4 * (sim.replica_id == 2), **settings)[1]

    late = [Fault("late", replica_id=2, step=4)]
    first, second, joiner = simulate(replica, num_replicas=3, faults=late)
    assert first == [1] + [10] * 7 and second == [1] + [7] * 7
    assert joiner == [7, 3, 3, 3]


@pytest.mark.parametrize("at", range(1, 36, 5))
def test_resumed_in_the_middle_of_a_turn_it_ends_with_the_same_turns(clock, at):
    settings = {"sync_every": 12, "round_seconds": "auto", "num_replicas": 2}

    def build(sim):
        model = Constant(10.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, inner, DiLoCo(sim.manager, model, inner, plain_sgd(), **settings)

    def steps(sim, inner, count):
        for _ in range(count):
            clock.advance(SPEEDS[sim.replica_id])
            take_step(inner, -1.0)

    def end(diloco):
        return diloco.global_digest(), [r.contribution for r in diloco.pop_finished_syncs()]

    def whole(sim):
        model, inner, diloco = build(sim)
        share = (3, 2)[sim.replica_id]
        with diloco:
            steps(sim, inner, at * share)
            saved = model.state_dict(), diloco.state_dict()
            before = len(diloco.pop_finished_syncs())
            saved = [{k: v.clone() for k, v in saved[0].items()}, saved[1]]
            steps(sim, inner, 20 * share)
            return saved, before, end(diloco)

    ended = simulate(whole, num_replicas=2)

    def resumed(sim):
        (local, state), _, _ = ended[sim.replica_id]
        model, inner, diloco = build(sim)
        model.load_state_dict(local)
        diloco.load_state_dict(state)
        with diloco:
            steps(sim, inner, 20 * (3, 2)[sim.replica_id])
            return end(diloco)

    assert simulate(resumed, num_replicas=2) == [each[2] for each in ended]


def test_bounds_are_a_tenth_of_sync_every_and_more_than_the_delay():
    def settings(**named):
        return DiLoCoSettings(round_seconds=10, **named)

    assert settings(sync_every=100).steps_allowed(1) == range(10, 101)
    assert settings(sync_every=100, num_fragments=4).steps_allowed(1) == range(3, 26)
    assert settings(sync_every=100, fragment_sync_delay=20).steps_allowed(1) == range(21, 101)
    assert DiLoCoSettings(sync_every=100, num_fragments=4).steps_allowed(1) == range(25, 26)


@pytest.mark.parametrize(("round_seconds", "of_a_joiner"), [("auto", 20), (15.0, 24)])
def test_a_turn_follows_from_the_paces_that_are_known(round_seconds, of_a_joiner):
    settings = DiLoCoSettings(sync_every=50, round_seconds=round_seconds)
    length = RoundLength(settings)
    length.choose([Vitals(), Vitals()])
    assert length.steps_before(1) == 5  # nobody has measured anything
    length.choose([Vitals(), Vitals(step_s=0.25), Vitals(step_s=0.625)])
    assert length.steps_before(1) == of_a_joiner  # at the pace of the slowest group
    length.measure(0.5)
    length.choose([Vitals(), Vitals(step_s=0.25)])
    assert length.steps_before(1) == (25 if round_seconds == "auto" else 30)


def test_without_a_pace_of_any_group_it_stays_as_it_is():
    settings = DiLoCoSettings(sync_every=50, round_seconds="auto")
    length = RoundLength(settings)
    length.measure(0.5)
    length.choose([Vitals(), Vitals()])
    assert length.steps_before(1) == 5


def test_weights_follow_the_steps_unless_they_are_set():
    assert DiLoCoSettings().weight_by == "uniform"
    assert DiLoCoSettings(round_seconds=60).weight_by == "steps"
    assert DiLoCoSettings(round_seconds=60, weight_by="tokens").weight_by == "tokens"
