"""What the display reads about a group. Run: pytest tests/launch/test_group_view.py."""

import time

import pytest
from recorded_groups import sync_line, view_of, write_group
from run_events import write_events

from composer_replication.launch.group_view import GroupView


def test_a_group_that_has_written_nothing_is_starting(tmp_path):
    view = view_of(tmp_path / "replica_3")
    assert (view.name, view.phase, view.state, view.mood) == ("3", "starting", "starting", "good")
    assert (view.round, view.loss, view.time_left) == ("-", None, "-")
    assert (view.done, view.participants, view.outer_step) == (None, None, 0)


def test_a_groups_progress_is_read_from_its_files(tmp_path):
    syncs = [sync_line(1), sync_line(2, participants=4)]
    view = view_of(write_group(tmp_path, 0, syncs=syncs, max_batches=195))
    assert (view.state, view.round, view.rounds, view.loss) == ("training", "2 / 20", 20, 3.14159)
    assert (view.done, view.time_left) == (25 / 195, "1 min 15 s")
    assert (view.outer_step, view.participants) == (2, 4)
    assert (view.sync_s, view.compute_fraction) == (0.25, 0.9)


def test_a_group_that_has_joined_late_is_in_the_round_of_the_others(tmp_path):
    joined = {"batch": 95, "inner_steps": 5, "round": 0.5}
    assert view_of(write_group(tmp_path, 0, **joined)).round == "9 / 20"


def test_a_group_without_a_known_end_has_neither_rounds_nor_a_done_part(tmp_path):
    view = view_of(write_group(tmp_path, 0, max_batches=None))
    assert (view.round, view.done) == ("2", None)


@pytest.mark.parametrize(
    ("phase", "exit_status", "shown", "mood"),
    [
        ("training", 0, "finished", "good"),
        ("training", -9, "failed", "bad"),
        ("left out", 1, "left out", "bad"),
        ("not back", 1, "not back", "bad"),
        ("rejected", 2, "rejected", "bad"),
    ],
)
def test_the_end_of_a_group_is_shown_as_what_it_means(tmp_path, phase, exit_status, shown, mood):
    view = view_of(write_group(tmp_path, 0, phase=phase), exit_status)
    assert (view.state, view.mood, view.time_left) == (shown, mood, "-")


def test_a_group_that_died_counts_down_to_its_restart(tmp_path):
    folder = write_group(tmp_path, 0, phase="restarting", restart_at=time.time() + 600)
    view = view_of(folder)
    assert view.state in ("restarts in 600 s", "restarts in 599 s") and view.mood == "waiting"
    view = view_of(write_group(tmp_path, 0, phase="restarting", restart_at=time.time() - 5))
    assert view.state == "starting again"


@pytest.mark.parametrize(
    ("since_s", "seconds_left", "state"),
    [
        (5, 75.0, "training"),
        (3000, 75.0, "no step for 50 min"),
        (30, 1750.0, "training"),  # 10 s a batch: three steps' time is nothing
        (3000, 1750.0, "no step for 50 min"),
    ],
)
def test_a_group_that_completes_no_step_for_long_is_shown_so(
    tmp_path, since_s, seconds_left, state
):
    status = {"trained_at": time.time() - since_s, "seconds_left": seconds_left}
    view = view_of(write_group(tmp_path, 0, **status))
    assert view.state == state
    assert view.mood == ("good" if state == "training" else "waiting")
    assert (view.time_left == "-") == (state != "training")


def test_only_training_can_be_silent(tmp_path):
    view = view_of(write_group(tmp_path, 0, phase="evaluating", trained_at=time.time() - 900))
    assert (view.state, view.silent_s) == ("evaluating", 0.0)


def test_a_group_keeps_its_last_digests_only(tmp_path):
    steps = [*range(1, 1500), *range(1400, 1600)]  # 100 made again after a resume
    view = view_of(write_group(tmp_path, 0, syncs=[sync_line(step) for step in steps]))
    assert list(view.digests) == list(range(600, 1600))


def test_lines_that_are_no_syncs_are_passed_over(tmp_path):
    folder = write_group(tmp_path, 0, syncs=[sync_line(7)])
    write_events(folder, "evaluation", {"eval": {"loss": 1.0}})
    view = GroupView(folder)
    view.update(None)
    assert view.outer_step == 7
