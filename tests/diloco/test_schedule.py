"""A schedule of the outer numbers and of the rounds."""

import logging
from functools import partial

import pytest
from common import Constant, TinyMLP
from golden.runs import rows
from harness.groups import adamw, learn, run

from composer_replication.simulation.simulation import Fault

BASE = {"outer_lr": 0.5, "outer_momentum": 0.75}
ROWS = rows((2, 0.25, 0.5), (3, 1, 0), (5, 0.5, 0.75))
"""The momentum goes down, to nothing, and comes back."""


def test_each_outer_step_is_taken_with_its_row_and_follows_the_trace_computed_by_hand(caplog):
    # Two groups, two steps of -0.5 and -1.5 a round: a mean pseudo-gradient of 2.
    # Step 1: momentum 2, theta 10 - 0.5 * (2 + 0.75 * 2) = 8.25. Step 2: momentum 0.5 * 2 + 2 = 3,
    # theta 8.25 - 0.25 * (2 + 0.5 * 3) = 7.375. Steps 3 and 4 have no momentum: 5.375, 3.375.
    # Step 5 begins with a momentum of 2 again: 3.375 - 0.5 * (2 + 0.75 * 2) = 1.625.
    def replica(group):
        thetas = []
        for _ in range(5):
            group.step(*[-0.5 - group.id] * 2)
            thetas += group.theta
        return thetas, group.of_reports("outer_lr", "outer_momentum")

    caplog.set_level(logging.INFO, "composer_replication")
    numbers = [(0.5, 0.75), (0.25, 0.5), (1, 0), (1, 0), (0.5, 0.75)]
    seen = ([8.25, 7.375, 5.375, 3.375, 1.625], numbers)
    assert run(2, replica, sync_every=2, schedule=ROWS, **BASE) == [seen] * 2
    assert caplog.text.count("From outer step 3 on: outer_lr 1, outer_momentum 0") == 2


def test_without_a_row_that_applies_a_schedule_changes_no_bit():
    later = {"schedule": rows((99, 0.1, 0.1))}
    assert learn(2, 12, sync_every=4, **BASE) == learn(2, 12, sync_every=4, **BASE, **later)


def test_a_row_leaves_what_it_does_not_name():
    def replica(group):
        group.step(*[-1.0] * 5)
        return group.of_reports("outer_lr", "outer_momentum")

    schedule = [{"outer_step": 2, "outer_lr": 0.25}, {"outer_step": 4, "outer_momentum": 0.5}]
    numbers = [(0.5, 0.75), (0.25, 0.75), (0.25, 0.75), (0.25, 0.5), (0.25, 0.5)]
    assert run(1, replica, sync_every=1, schedule=schedule, **BASE) == [numbers]


# ---- the length of rounds ----------------------------------------------------------------------

SHORT_FIRST = {"sync_every": 2, "schedule": [{"outer_step": 4, "sync_every": 6}]}
UP_AND_DOWN = [{"outer_step": n, "sync_every": h} for n, h in ((2, 4), (4, 10), (5, 2))]


@pytest.mark.parametrize(("settings", "steps"), [
    ({}, [2, 4, 6, 12, 18, 24, 30]),
    ({"fragment_sync_delay": 1}, [2, 4, 6, 12, 18, 24, 30]),
    # Each sync of a fragment is an outer step: three of them end inside the second round.
    ({"model": partial(Constant, a=(1,), b=(1,)),
      "fragment_patterns": ["a", "b"]}, [1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]),
    ({"schedule": UP_AND_DOWN}, [2, 6, 10, 20, 22, 24, 26, 28, 30]),
])  # fmt: skip
def test_rounds_have_the_length_of_their_outer_step(settings, steps):
    def replica(group):
        group.step(*[-1.0] * 30)
        return group.of_reports("inner_steps")

    assert run(2, replica, **SHORT_FIRST | settings) == [steps] * 2


def test_the_outer_steps_before_a_row_are_those_of_a_run_without_it():
    warm, short = learn(2, 30, **SHORT_FIRST)[0], learn(2, 6, sync_every=2, schedule=[])[0]
    assert [warm[n] for n in (1, 2, 3)] == [short[n] for n in (1, 2, 3)]


@pytest.mark.parametrize("step", range(2, 7))
@pytest.mark.parametrize("schedule", [SHORT_FIRST["schedule"], ROWS], ids=str)
def test_a_joiner_takes_each_outer_step_with_the_same_row(step, schedule):
    def replica(group):
        group.step(*[-0.5 - group.id] * 30)
        names = ("outer_step", "inner_steps", "outer_lr", "global_digest")
        return {number: row for number, *row in group.of_reports(*names)}

    late = Fault("late", replica_id=1, step=step)
    settings = {"digest_every": 1, "sync_every": 2, "schedule": schedule}
    one, other = run(2, replica, late, **settings)
    shared = sorted(one.keys() & other.keys())
    assert shared[0] == step and len(shared) > 1
    assert [one[n][1:] for n in shared] == [other[n][1:] for n in shared]
    lengths = [[seen[n + 1][0] - seen[n][0] for n in shared[:-1]] for seen in (one, other)]
    assert lengths[0] == lengths[1]


# ---- the warm-up that is the default -----------------------------------------------------------

WARM = {"sync_every": 1, "digest_every": 1, "model": TinyMLP, "inner": adamw}
"""Settings of a training without outer numbers and without a schedule."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["late", "restart", "fail_commit", "fail_heal"])
def test_a_joiner_and_a_heal_within_the_warm_up_have_the_numbers_and_bits_of_the_others(kind):
    def replica(group):
        group.learn(0, 30)
        return group.of_reports("outer_step", "outer_lr", "outer_momentum", "global_digest")

    faults = [Fault("late" if kind == "fail_heal" else kind, replica_id=1, step=8)]
    faults += [Fault(kind, replica_id=1, step=8)] if kind == "fail_heal" else []
    one, other = run(2, replica, *faults, **WARM)
    shared = {row[0] for row in one} & {row[0] for row in other}
    assert {9, 20, 21, 26} <= shared
    of_one, of_other = ([row for row in each if row[0] in shared] for each in (one, other))
    assert of_one == of_other
    assert [row[1:3] for row in of_one] == [(1.0, 0.0) if s < 21 else (0.7, 0.5) for s in shared]


def test_the_warm_up_has_twenty_outer_steps_of_each_fragment():
    def replica(group):
        group.learn(0, 48)
        return group.of_reports("fragment", "outer_lr", "outer_momentum_norm")

    settings = WARM | {"sync_every": 2, "num_fragments": 2}
    (reports, _) = run(2, replica, **settings)
    for fragment in range(2):
        own = [report for report in reports if report[0] == fragment]
        assert [lr for _, lr, _ in own] == [1.0] * 20 + [0.7] * 4
        assert [norm > 0 for *_, norm in own] == [False] * 20 + [True] * 4
