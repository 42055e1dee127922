"""Where a group's time went, by traces computed by hand.

Run: pytest tests/benchmarks/test_group_time.py.

The groups' files are stood in for by lists.
"""

import pytest
from group_time import PARTS, account
from traces import rounds, start, sync


def parts(**seconds):
    return pytest.approx(dict.fromkeys(PARTS, 0.0) | seconds, abs=1e-9)


def check_sum(time, wall_s):
    assert time.wall_s == pytest.approx(wall_s)
    assert sum(time.parts.values()) == pytest.approx(wall_s)


def test_a_group_without_faults_trains_syncs_and_waits():
    time = account([start(10.0)], rounds(10.0, 4))
    assert time.pace_s == pytest.approx(0.1) and time.steps == 40
    assert time.parts == parts(training=4.0, syncs=0.6, waiting=0.2)
    assert list(time.sync_s) == pytest.approx([0.15] * 4)
    assert list(time.wait_s) == pytest.approx([0.05] * 4)
    check_sum(time, 4.8)


def test_a_group_that_is_killed_and_started_again():
    # Two rounds, five steps that nobody gets, 1.1 s until the next process, 6 s until it trains.
    starts = [start(10.0), start(20.0, started=14.0, trained_at=12.9, before=25)]
    joins = sync(20.0, 5, 0, blocked=0.0, waited=6.0)  # its wait is a part of the start
    time = account(starts, [*rounds(10.0, 2), joins, *rounds(20.0, 2, outer_step=5)])
    assert time.parts == parts(
        training=4.0, syncs=0.6, waiting=0.2, thrown_away=0.5, dead=1.1, starting=6.0
    )
    assert (time.steps, time.steps_thrown_away) == (40, 5)
    assert (time.dead_s, time.starting_s) == ([pytest.approx(1.1)], [pytest.approx(6.0)])
    check_sum(time, 12.4)


def test_a_group_that_does_not_come_back_is_dead_until_the_run_ends():
    time = account([start(10.0)], rounds(10.0, 2), end=15.0, trained_at=12.7)
    assert time.parts == parts(training=2.0, syncs=0.3, waiting=0.1, thrown_away=0.3, dead=2.3)
    check_sum(time, 5.0)


def test_a_group_that_is_left_behind_throws_steps_away():
    # It was stopped for 5 s: then the others are ahead of it, and its ten steps are lost.
    lines = [*rounds(10.0, 2), sync(18.6, 5, 30, lost=10), *rounds(18.6, 1, outer_step=5, steps=30)]
    time = account([start(10.0)], lines, faults=[(12.5, 17.5)])
    assert (time.steps, time.steps_thrown_away) == (30, 10)
    assert time.parts == parts(training=3.0, syncs=0.6, waiting=0.2, thrown_away=1.0, dead=5.0)
    check_sum(time, 9.8)


def test_of_several_fragments_the_steps_since_the_last_sync_of_any_are_lost():
    lines = [*rounds(10.0, 2), sync(13.6, 3, 30, lost=25)]
    time = account([start(10.0)], lines)
    assert (time.steps, time.steps_thrown_away) == (20, 10)
    check_sum(time, 3.6)


def test_what_a_fault_took_is_the_time_not_trained_while_it_lasted():
    # Of a round of 3.65 s, 1 s is training and 2.5 s is a wait; the fault lasted for 2 s of it. In
    # the round before, it struck while the group trained, and took nothing.
    lines = [*rounds(10.0, 2), sync(16.05, 3, 30, blocked=2.65, waited=2.5)]
    for began, dead in ((13.4, 2.0), (12.9, 2.0), (13.9, 1.5), (11.3, 0.0)):
        until = 15.4 if dead else 12.1
        time = account([start(10.0)], lines, faults=[(began, until)])
        assert time.parts == parts(training=3.0, syncs=0.45, waiting=2.6 - dead, dead=dead)
        check_sum(time, 6.05)


def test_steps_that_took_longer_than_usual_are_other():
    lines = [*rounds(10.0, 3), sync(16.4, 4, 40)]  # a round with an evaluation of 1.6 s
    time = account([start(10.0)], lines)
    assert time.parts == parts(training=4.0, syncs=0.6, waiting=0.2, other=1.6)
    check_sum(time, 6.4)


def test_outer_steps_that_a_resume_of_all_groups_repeats_are_counted_once():
    # The checkpoint was of outer step 1. Steps 2 and 3 are made again.
    starts = [start(10.0), start(20.0, started=15.0, steps=10, trained_at=13.6, before=30)]
    lines = [*rounds(10.0, 3), *rounds(20.0, 2, outer_step=1, steps=10)]
    time = account(starts, lines)
    assert (time.steps, time.steps_thrown_away) == (30, 20)
    assert time.parts == parts(
        training=3.0, thrown_away=2.0, syncs=0.75, waiting=0.25, dead=1.4, starting=5.0
    )
    check_sum(time, 12.4)


def test_inner_steps_of_a_checkpoint_in_mid_round_are_kept():
    # The checkpoint had 14 inner steps; the round of steps 11 to 20 is made again from there.
    starts = [start(10.0), start(20.0, started=15.0, steps=14, trained_at=13.6, before=30)]
    time = account(starts, [*rounds(10.0, 3), sync(20.8, 2, 20), sync(22.0, 3, 30)])
    assert (time.steps, time.steps_thrown_away) == (30, 16)
    check_sum(time, 12.0)


def test_the_time_in_which_the_whole_run_was_stopped_is_not_the_groups():
    starts = [start(10.0), start(9006.0, started=9000.0, steps=24, trained_at=None, before=24)]
    time = account(starts, [*rounds(10.0, 2), sync(9007.2, 3, 34)])
    assert time.parts == parts(training=3.0, syncs=0.45, waiting=0.15, starting=6.0)
    assert time.steps_thrown_away == 4
    check_sum(time, 9.6)


def test_a_second_fit_of_a_process_is_no_death():
    starts = [start(10.0, started=2.0), start(13.0, started=2.0, steps=20, trained_at=12.5)]
    time = account(starts, [*rounds(10.0, 2), *rounds(13.0, 1, outer_step=2, steps=20)])
    assert time.parts == parts(training=3.0, syncs=0.45, waiting=0.15, starting=0.6)
    assert time.dead_s == [] and time.starting_s == []
    check_sum(time, 4.2)


def test_a_clock_that_was_set_back_takes_no_time_away():
    time = account([start(10.0)], [*rounds(10.0, 2), sync(11.0, 3, 30), *rounds(12.4, 1, steps=30)])
    assert all(seconds >= -1.1 for seconds in time.parts.values())
    check_sum(time, 3.6)


def test_without_inner_steps_there_is_no_account():
    assert account([], rounds(10.0, 2)) is None  # a run from before starts were written
    assert account([start(10.0)], []) is None
    assert account([start(10.0)], [sync(10.0, 5, 0, blocked=0.0)]) is None
