"""A schedule of the outer numbers and the rounds. The reference is in plain Python."""

import logging
from functools import partial

import pytest
from common import Constant
from golden.runs import rows
from promises.groups import learn, run

from composer_replication.simulation.simulation import Fault

BASE = {"outer_lr": 0.5, "outer_momentum": 0.75}
ROWS = ((3, 0.25, 0.5), (5, 1, 0), (7, 0.5, 0.75))
"""The momentum goes down, to nothing, and comes back."""


def move(replica_id, step):
    """What an inner step of a group adds; in eighths, which fp32 adds without an error."""
    return ((5 * step + 3 * replica_id) % 7 - 2) / 8


def scheduled(k, *faults, num_fragments=1, steps=20, **settings):
    """By outer step: the numbers that it was taken with and the global values after it."""

    def replica(group):
        trace = {}
        for step in range(steps):
            done = len(group.reports)
            group.step(move(group.id, step))
            for report in group.reports[done:]:
                numbers = report.outer_lr, report.outer_momentum
                trace[report.outer_step] = (*numbers, group.theta)
        return trace

    names = [f"p{number}" for number in range(num_fragments)]
    settings = BASE | {"schedule": rows(*ROWS), "fragment_patterns": names} | settings
    settings |= {"model": partial(Constant, **dict.fromkeys(names, (1,)))}
    return run(k, replica, *faults, sync_every=2 * num_fragments, **settings)


def reference(num_outer_steps, num_fragments, num_replicas):
    """Streaming DiLoCo of constant moves with SGD, in plain Python."""
    theta, local = [10.0] * num_fragments, [[10.0] * num_fragments for _ in range(num_replicas)]
    momentum, trace = [None] * num_fragments, {}
    for outer_step in range(1, num_outer_steps + 1):
        for step in (2 * outer_step - 2, 2 * outer_step - 1):
            for replica_id, own in enumerate(local):
                own[:] = [value + move(replica_id, step) for value in own]
        lr, beta = BASE["outer_lr"], BASE["outer_momentum"]
        for first, row_lr, row_beta in ROWS:
            if first <= outer_step:
                lr, beta = row_lr, row_beta
        turn = (outer_step - 1) % num_fragments
        delta = sum(theta[turn] - own[turn] for own in local) / num_replicas
        if beta:
            old = momentum[turn]
            momentum[turn] = delta if old is None else beta * old + delta
            theta[turn] -= lr * (delta + beta * momentum[turn])
        else:
            momentum = [None] * num_fragments
            theta[turn] -= lr * delta
        for own in local:
            own[turn] = theta[turn]
        trace[outer_step] = (lr, beta, pytest.approx(list(theta), abs=1e-5))
    return trace


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_each_outer_step_is_taken_with_its_row(num_fragments, caplog):
    caplog.set_level(logging.INFO, "composer_replication")
    expected = reference(10, num_fragments, num_replicas=2)
    assert scheduled(2, num_fragments=num_fragments) == [expected] * 2
    assert caplog.text.count("From outer step 5 on: outer_lr 1, outer_momentum 0") == 2


def test_without_a_row_that_applies_a_schedule_changes_no_bit():
    later = rows((99, 0.1, 0.1))
    assert scheduled(2, schedule=None) == scheduled(2, schedule=later)


def test_a_row_leaves_what_it_does_not_name():
    schedule = [{"outer_step": 2, "outer_lr": 0.25}, {"outer_step": 4, "outer_momentum": 0.5}]
    (trace,) = scheduled(1, steps=10, schedule=schedule)
    numbers = [trace[n][:2] for n in range(1, 6)]
    assert numbers == [(0.5, 0.75), (0.25, 0.75), (0.25, 0.75), (0.25, 0.5), (0.25, 0.5)]


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
    warm, short = learn(2, 30, **SHORT_FIRST)[0], learn(2, 6, sync_every=2)[0]
    assert [warm[n] for n in (1, 2, 3)] == [short[n] for n in (1, 2, 3)]


@pytest.mark.parametrize("step", range(2, 7))
@pytest.mark.parametrize("schedule", [SHORT_FIRST["schedule"], rows(*ROWS)], ids=str)
def test_a_joiner_takes_each_outer_step_with_the_same_row(step, schedule):
    def replica(group):
        group.step(*[move(group.id, step) for step in range(30)])
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
