"""What is read and said about groups. Run: pytest tests/launch/test_live_run.py."""

import re
import time

import pytest
from recorded_groups import group_of, recorded, run_of, sync_line, write_group
from run_events import write_events

from composer_replication.launch.display import LiveRun


def write_timed(run_dir, replica_id, *, syncs=(), **status):
    """Write a group whose times are seconds from now."""
    for name in status.keys() & {"trained_at", "restart_at"}:
        status[name] += time.time()
    return write_group(run_dir, replica_id, syncs=syncs, **status)


# ---- one group -----------------------------------------------------------------------------------


def test_a_group_that_has_written_nothing_is_starting(tmp_path):
    group = group_of(tmp_path / "replica_3")
    assert (group.name, group.state, group.mood) == ("3", "starting", "good")
    assert (group.step, group.seconds_left) == ("", None)
    assert (group.done, group.outer_step, group.newest) == (None, 0, {})


@pytest.mark.parametrize(
    ("max_batches", "step", "done"), [(195, "25 / 195", 25 / 195), (None, "25", None)]
)
def test_a_groups_progress_is_read_from_its_files(tmp_path, max_batches, step, done):
    syncs = [sync_line(1), sync_line(2, participants=4)]
    group = group_of(write_group(tmp_path, 0, syncs=syncs, max_batches=max_batches))
    assert (group.step, group.done) == (step, done)
    assert (group.outer_step, group.newest["diloco/num_participants"]) == (2, 4)


@pytest.mark.parametrize(
    ("status", "state", "mood", "seconds_left"),
    [
        ({}, "training", "good", 75.0),
        ({"phase": "finished"}, "finished", "good", None),
        ({"phase": "failed"}, "failed", "bad", None),
        ({"phase": "left out"}, "left out", "bad", None),
        ({"phase": "not back"}, "not back", "bad", None),
        ({"phase": "rejected"}, "rejected", "bad", None),
        ({"phase": "restarting", "restart_at": 600.4}, "restarts in 600 s", "waiting", None),
        ({"phase": "restarting", "restart_at": -5}, "starting again", "waiting", None),
        ({"trained_at": -5}, "training", "good", 75.0),
        ({"trained_at": -3000}, "no step for 50 min", "waiting", None),
        # 10 s a batch: three steps' time is nothing.
        ({"trained_at": -30, "seconds_left": 1750.0}, "training", "good", 1750.0),
        ({"trained_at": -3000, "seconds_left": 1750.0}, "no step for 50 min", "waiting", None),
        # Only training can be silent.
        ({"phase": "evaluating", "trained_at": -900}, "evaluating", "good", None),
    ],
)
def test_the_state_of_a_group_is_what_it_means(tmp_path, status, state, mood, seconds_left):
    group = group_of(write_timed(tmp_path, 0, **status))
    assert (group.state, group.mood, group.seconds_left) == (state, mood, seconds_left)


def test_a_group_keeps_its_last_digests_only(tmp_path):
    steps = [*range(1, 1500), *range(1400, 1600)]  # 100 made again after a resume
    group = group_of(write_group(tmp_path, 0, syncs=[sync_line(step) for step in steps]))
    assert list(group.digests) == list(range(600, 1600))


# ---- all groups in a line ------------------------------------------------------------------------

NEWEST = sync_line(8, participants=2)


@pytest.mark.parametrize(
    ("syncs", "overview"),
    [
        # At the last step that all have.
        (
            [[sync_line(1), sync_line(2, digest="ef")], [sync_line(1)]],
            "outer step 2: 2 of 2 groups, parameters equal at step 1: abababab",
        ),
        (
            [[sync_line(1), sync_line(2, digest="ef")], [sync_line(1, digest="cd")]],
            "outer step 2: 2 of 2 groups, parameters DIFFER at step 1",
        ),
        ([[sync_line(2, participants=1)]], "outer step 2: 1 of 1 group"),
        ([[sync_line(2, digest=None)]] * 2, "outer step 2: 2 of 2 groups"),
        # The participants are those of the newest sync.
        (
            [[sync_line(3, participants=1)], [NEWEST], [NEWEST]],
            "outer step 8: 2 of 3 groups, parameters equal: abababab",
        ),
    ],
)
def test_participants_and_parameters_are_those_of_the_newest_sync(tmp_path, syncs, overview):
    for i, lines in enumerate(syncs):
        write_group(tmp_path, i, syncs=lines, outer_step=lines[-1]["diloco/outer_step"])
    groups = run_of(tmp_path, len(syncs))
    assert groups.overview == overview
    assert groups.differ == ("DIFFER" in overview)


def test_before_the_first_sync_there_is_nothing_to_say(tmp_path):
    groups = run_of(tmp_path, 2)
    assert (groups.overview, groups.participants, groups.status_line) == ("", None, "starting")


def test_a_run_that_was_never_synced_says_that_it_learned_nothing(tmp_path):
    end = {"inner_steps": 40, "outer_steps": 0, "global_digest": "ab" * 32}
    write_events(tmp_path / "replica_0", "end", end)
    run = run_of(tmp_path, 1)
    assert run.overview == "learned nothing" and run.status_line == "learned nothing"


def test_one_line_has_the_run_and_no_line_is_longer_for_more_groups(tmp_path):
    two = recorded(tmp_path / "two", 2).status_line
    assert two == (
        "outer step 2: 2 of 2 groups, step 25 / 200, loss 3.142, 1 min 15 s left, "
        "parameters equal: abababab"
    )
    assert len(recorded(tmp_path / "many", 64).status_line) == len(two) + 2


def test_the_line_has_the_range_of_losses_and_the_slowest_groups_time(tmp_path):
    for i in range(3):
        place = {"batch": 20 + 10 * i, "seconds_left": 60.0 * i}
        write_group(tmp_path, i, loss=3.0 - i / 2, **place)
    line = run_of(tmp_path, 3).status_line
    assert line == "step 40 / 200, loss 2.000 to 3.000, 2 min 0 s left"


@pytest.mark.parametrize("phase", ["restarting", "left out", "stopped"])
def test_a_group_that_died_does_not_count_with_its_old_values(tmp_path, phase):
    place = {"outer_step": 2, "loss": 2.0, "seconds_left": 30.0}
    for i in range(2):
        write_group(tmp_path, i, syncs=[sync_line(1), sync_line(2)], **place)
    write_group(tmp_path, 2, syncs=[sync_line(1, digest="cd")], phase=phase)
    line = run_of(tmp_path, 3).status_line
    assert ", loss 2.000, 30 s left, parameters equal: abababab" in line
    assert ("group 2 " in line) == (phase != "stopped")


def test_what_is_wrong_is_named_with_its_groups(tmp_path):
    silent = {"trained_at": -3000}
    for i, state in enumerate([{}, silent, silent, {"phase": "left out"}]):
        write_timed(tmp_path, i, **state)
    line = run_of(tmp_path, 4).status_line
    assert line.endswith("group 1, 2 no step for 50 min, group 3 left out")


# ---- news ----------------------------------------------------------------------------------------


def test_a_run_without_events_has_no_news(tmp_path):
    groups = LiveRun(tmp_path, range(2))
    assert groups.update() == []
    for phase in ("training", "evaluating"):
        recorded(tmp_path, 2, phase=phase)
        assert groups.update() == []


def test_a_group_that_comes_back_is_announced_once(tmp_path):
    groups = recorded(tmp_path, 2)
    for phase in ("restarting", "joining"):
        write_group(tmp_path, 1, phase=phase, restart_at=0.0)
        assert groups.update() == []
    write_group(tmp_path, 1, outer_step=9)
    (line,) = groups.update()
    assert re.fullmatch(r"group 1 is back after \d+ s, at outer step 9", line)
    assert groups.update() == []


def test_each_change_is_news_once_and_a_difference_again_after_it_has_ended(tmp_path):
    groups = recorded(tmp_path, 3)

    def news(writes):
        for replica_id, status in writes.items():
            write_timed(tmp_path, replica_id, **status)
        said = groups.update()
        assert groups.update() == []
        return said

    for step, expected in ((3, ["outer step 3: 2 of 3 groups took part, 3 before"]), (4, [])):
        sync = {"syncs": [sync_line(step, participants=2)]}
        assert news({0: sync, 2: sync}) == expected
    silent = {"trained_at": -300}
    assert news({0: silent, 2: silent}) == ["groups 0 and 2: no step for 2 min"]
    assert news({1: silent}) == ["group 1: no step for 2 min"]
    for step, digest in [(5, "cd"), (6, "cd"), (7, "ab"), (8, "cd")]:
        own, other = (
            {"syncs": [sync_line(step, participants=2, digest=each)]} for each in (digest, "ab")
        )
        differ = [f"the groups' parameters DIFFER at step {step}"] if step in (5, 8) else []
        assert news({0: own, 2: other}) == differ
    for replica_id in (0, 1):
        said = {"time": time.time(), "warning": "outer_momentum=0.9"}
        write_events(tmp_path / f"replica_{replica_id}", "warning", said)
    assert news({}) == ["outer_momentum=0.9"]
