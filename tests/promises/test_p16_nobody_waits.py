"""P16: groups of unequal speed all train all the time (``round_seconds``), and idle ones cost none.

A group's clock goes on in its inner steps alone.
"""

import threading
from functools import partial

import pytest
import torch
from common import TinyMLP, plain_sgd
from harness.groups import run

from composer_replication.diloco import hang_watch
from composer_replication.diloco.outer_health import GroupMetrics
from composer_replication.diloco.round_length import RoundLength
from composer_replication.settings import DiLoCoSettings
from composer_replication.simulation.simulation import Fault

SPEEDS = (1.0, 1.5, 3.0)
"""Seconds of an inner step, by group."""


class Clock:
    """The time of the group whose thread asks for it."""

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


def timed(clock, k, syncs, *faults, speed_of=None, **settings):
    """The contributions, lengths of rounds and global values of groups that move by -1 a step."""

    def replica(group):
        thetas = []
        while len(group.reports) < (syncs[group.id] if isinstance(syncs, list) else syncs):
            done = len(group.reports)
            clock.advance(speed_of(group.id, done) if speed_of else SPEEDS[group.id])
            group.step(-1.0)
            if len(group.reports) > done:
                thetas.append(round(group.theta[0], 3))
        return group.of_reports("contribution"), group.of_reports("sync_every"), thetas

    return run(k, replica, *faults, outer=plain_sgd(), **settings)


def test_groups_of_three_speeds_take_as_many_steps_as_the_fastest_ones_time_allows(clock):
    # Two rounds with the fewest steps, until all have measured and said their pace. Then the
    # fastest group takes sync_every=30 steps in 30 s, the others 20 and 10 in the same time. The
    # weighted mean of n steps that contribute n each: (900 + 400 + 100) / 60 = 23.333.
    settings = {"sync_every": 30, "round_seconds": "auto", "num_replicas": 3}
    runs = timed(clock, 3, 4, **settings)
    for (contributions, lengths, thetas), steps in zip(runs, (30, 20, 10), strict=True):
        assert contributions == [3, 3, steps, steps] and lengths == [3, steps, steps, steps]
        assert thetas == pytest.approx([7.0, 4.0, 4 - 70 / 3, 4 - 140 / 3], abs=1e-3)


def test_a_given_time_is_shared_by_the_fragments_and_bounded_by_sync_every(clock):
    # 20 s a round and two fragments: 10 steps, 6.67 and 3.33 in a turn, of at most 16 / 2 = 8.
    settings = {"sync_every": 16, "num_fragments": 2, "fragment_sync_delay": 1}
    settings |= {"model": TinyMLP, "inner": partial(torch.optim.SGD, lr=0.0)}
    runs = timed(clock, 3, 5, round_seconds=20, num_replicas=3, **settings)
    assert [lengths for _, lengths, _ in runs] == [[16] * 5, [14] * 5, [6] * 5]


def test_a_group_that_becomes_slower_takes_fewer_steps_and_one_long_turn_changes_nothing(clock):
    def speed_of(group, syncs):
        return 1.0 if group == 0 else 5.0 if syncs == 3 else 2.0 if syncs > 6 else 1.0

    settings = {"sync_every": 20, "round_seconds": 12, "num_replicas": 2}
    same, slower = timed(clock, 2, 12, speed_of=speed_of, **settings)
    assert same[1] == [12] * 12
    # One turn took 5 s a step, which changes nothing; the second one of 2 s a step does.
    assert slower[1] == [12] * 8 + [6] * 4


def test_a_joiner_begins_with_the_steps_of_the_slowest_group_and_then_takes_its_share(clock):
    late = Fault("late", replica_id=2, step=4)
    settings = {"sync_every": 10, "round_seconds": "auto", "num_replicas": 2}
    runs = timed(clock, 3, [8, 8, 4], late, **settings)
    assert [lengths for _, lengths, _ in runs] == [[1] + [10] * 7, [1] + [7] * 7, [7, 3, 3, 3]]


@pytest.mark.parametrize("at", range(1, 36, 5))
def test_resumed_in_the_middle_of_a_turn_it_ends_with_the_same_turns(clock, at):
    def steps(group, count):
        for _ in range(count * (3, 2)[group.id]):
            clock.advance(SPEEDS[group.id])
            group.step(-1.0)

    def whole(group):
        steps(group, at)
        saved, before = group.save(), len(group.reports)
        steps(group, 20)
        return saved, (group.theta, group.of_reports("contribution")[before:])

    def resumed(group):
        steps(group, 20)
        return group.theta, group.of_reports("contribution")

    settings = {"sync_every": 12, "round_seconds": "auto", "num_replicas": 2}
    saved, ends = zip(*run(2, whole, **settings), strict=True)
    assert run(2, resumed, own=[{"saved": each} for each in saved], **settings) == [*ends]


# ---- how long a turn is ------------------------------------------------------------------------


def test_bounds_are_a_tenth_of_sync_every_and_more_than_the_delay():
    settings = partial(DiLoCoSettings, sync_every=100)
    assert settings(round_seconds=10).steps_allowed(1) == range(10, 101)
    assert settings(round_seconds=10, num_fragments=4).steps_allowed(1) == range(3, 26)
    assert settings(round_seconds=10, fragment_sync_delay=20).steps_allowed(1) == range(21, 101)
    assert settings(num_fragments=4).steps_allowed(241) == range(25, 26)


def test_weights_follow_the_steps_unless_they_are_set():
    assert DiLoCoSettings().weight_by == "uniform"
    assert DiLoCoSettings(round_seconds=60).weight_by == "steps"
    assert DiLoCoSettings(round_seconds=60, weight_by="tokens").weight_by == "tokens"


def test_without_a_pace_of_any_group_a_turn_stays_as_long_as_it_is():
    length = RoundLength(DiLoCoSettings(sync_every=50, round_seconds="auto"))
    length.choose([GroupMetrics(step_s=0.25)])
    length.choose([GroupMetrics(), GroupMetrics()])
    assert length.steps_before(1) == 50


def test_a_turn_that_took_no_time_says_nothing_of_the_pace():
    length = RoundLength(DiLoCoSettings(sync_every=50, round_seconds=10))
    before = length.steps_before(1)
    length.measure(0.0)
    length.choose([GroupMetrics(), GroupMetrics()])
    assert length.steps_before(1) == before
    length.measure(0.5)
    length.choose([GroupMetrics(step_s=0.5)])
    assert length.steps_before(1) == 20
