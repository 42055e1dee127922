"""What is read and said about groups. Run: pytest tests/launch/test_live_run.py."""

import re
import time

import pytest
from recorded_groups import group_of, recorded, run_of, sync_line, write_group
from run_events import write_events

from composer_replication.launch.display import LiveRun


def test_a_group_that_has_written_nothing_is_starting(tmp_path):
    group = group_of(tmp_path / "replica_3")
    assert (group.name, group.state, group.mood) == ("3", "starting", "good")
    assert (group.step, group.seconds_left) == ("-", None)
    assert (group.done, group.outer_step, group.newest) == (None, 0, {})


def test_a_groups_progress_is_read_from_its_files(tmp_path):
    syncs = [sync_line(1), sync_line(2, participants=4)]
    group = group_of(write_group(tmp_path, 0, syncs=syncs, max_batches=195))
    assert (group.state, group.step) == ("training", "25 / 195")
    assert (group.done, group.seconds_left) == (25 / 195, 75.0)
    assert (group.outer_step, group.newest["diloco/num_participants"]) == (2, 4)


def test_a_group_without_a_known_end_has_neither_rounds_nor_a_done_part(tmp_path):
    group = group_of(write_group(tmp_path, 0, max_batches=None))
    assert (group.step, group.done) == ("25", None)


@pytest.mark.parametrize("phase", ["finished", "failed", "left out", "not back", "rejected"])
def test_the_end_of_a_group_is_shown_as_what_it_means(tmp_path, phase):
    group = group_of(write_group(tmp_path, 0, phase=phase))
    mood = "good" if phase == "finished" else "bad"
    assert (group.state, group.mood, group.seconds_left) == (phase, mood, None)


def test_a_group_that_died_counts_down_to_its_restart(tmp_path):
    folder = write_group(tmp_path, 0, phase="restarting", restart_at=time.time() + 600)
    group = group_of(folder)
    assert group.state in ("restarts in 600 s", "restarts in 599 s") and group.mood == "waiting"
    group = group_of(write_group(tmp_path, 0, phase="restarting", restart_at=time.time() - 5))
    assert group.state == "starting again"


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
    group = group_of(write_group(tmp_path, 0, **status))
    assert group.state == state
    assert group.mood == ("good" if state == "training" else "waiting")
    assert (group.seconds_left is None) == (state != "training")


def test_only_training_can_be_silent(tmp_path):
    group = group_of(write_group(tmp_path, 0, phase="evaluating", trained_at=time.time() - 900))
    assert (group.state, group.silent_s) == ("evaluating", 0.0)


def test_a_group_keeps_its_last_digests_only(tmp_path):
    steps = [*range(1, 1500), *range(1400, 1600)]  # 100 made again after a resume
    group = group_of(write_group(tmp_path, 0, syncs=[sync_line(step) for step in steps]))
    assert list(group.digests) == list(range(600, 1600))


@pytest.mark.parametrize(
    ("other", "verdict"),
    [("ab", "equal at step 1: abababab"), ("cd", "DIFFER at step 1")],
)
def test_the_digests_of_the_last_step_that_all_have_are_compared(tmp_path, other, verdict):
    write_group(tmp_path, 0, syncs=[sync_line(1), sync_line(2, digest="ef")])
    write_group(tmp_path, 1, syncs=[sync_line(1, digest=other)], outer_step=1)
    groups = run_of(tmp_path, 2)
    assert groups.overview == f"outer step 2: 2 of 2 groups, parameters {verdict}"
    assert groups.differ == (other == "cd")


def test_one_group_and_groups_without_digests_are_not_compared(tmp_path):
    assert recorded(tmp_path / "one", 1).overview == "outer step 2: 1 of 1 group"
    for i in range(2):
        write_group(tmp_path, i, syncs=[sync_line(2, digest=None)])
    assert run_of(tmp_path, 2).overview == "outer step 2: 2 of 2 groups"


def test_the_participants_are_those_of_the_newest_sync(tmp_path):
    write_group(tmp_path, 0, syncs=[sync_line(3, participants=1)], outer_step=3)
    for i in (1, 2):
        write_group(tmp_path, i, syncs=[sync_line(8, participants=2)], outer_step=8)
    groups = run_of(tmp_path, 3)
    assert groups.participants == 2
    assert groups.overview.startswith("outer step 8: 2 of 3 groups")


def test_before_the_first_sync_there_is_nothing_to_say(tmp_path):
    groups = run_of(tmp_path, 2)
    assert (groups.overview, groups.participants, groups.status_line) == ("", None, "starting")


def test_one_line_has_the_run_and_no_line_is_longer_for_more_groups(tmp_path):
    two = recorded(tmp_path / "two", 2).status_line
    assert two == (
        "outer step 2: 2 of 2 groups, step 25 / 200, loss 3.142, 1 min 15 s left, "
        "parameters equal: abababab"
    )
    assert len(recorded(tmp_path / "many", 64).status_line) == len(two) + 2


def test_the_line_has_the_range_of_losses_and_the_slowest_groups_time(tmp_path):
    for i in range(3):
        place = {"round": 2.0 + i, "batch": 20 + 10 * i, "seconds_left": 60.0 * i}
        write_group(tmp_path, i, loss=3.0 - i / 2, **place)
    line = run_of(tmp_path, 3).status_line
    assert line == "step 40 / 200, loss 2.000 to 3.000, 2 min 0 s left"


@pytest.mark.parametrize("phase", ["restarting", "left out"])
def test_a_group_that_died_does_not_count_with_its_old_values(tmp_path, phase):
    place = {"outer_step": 2, "loss": 2.0, "seconds_left": 30.0}
    for i in range(2):
        write_group(tmp_path, i, syncs=[sync_line(1), sync_line(2)], **place)
    write_group(tmp_path, 2, syncs=[sync_line(1, digest="cd")], phase=phase)
    line = run_of(tmp_path, 3).status_line
    assert ", loss 2.000, 30 s left, parameters equal: abababab, group 2 " in line


def test_what_is_wrong_is_named_with_its_groups(tmp_path):
    silent = {"trained_at": time.time() - 3000}
    for i, state in enumerate([{}, silent, silent, {"phase": "left out"}]):
        write_group(tmp_path, i, **state)
    line = run_of(tmp_path, 4).status_line
    assert line.endswith("group 1, 2 no step for 50 min, group 3 left out")


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


def test_another_number_of_groups_in_a_sync_is_news_once(tmp_path):
    groups = recorded(tmp_path, 3)
    for step in (3, 4):
        for replica_id in (0, 2):
            write_group(tmp_path, replica_id, syncs=[sync_line(step, participants=2)])
        expected = "outer step 3: 2 of 3 groups took part, 3 before"
        assert groups.update() == ([expected] if step == 3 else [])


def test_a_warning_of_all_groups_is_news_once(tmp_path):
    groups = run_of(tmp_path, 2)
    for id in range(2):
        said = {"time": time.time(), "warning": "outer_momentum=0.9"}
        write_events(tmp_path / f"replica_{id}", "warning", said)
    assert groups.update() == ["outer_momentum=0.9"]
    assert groups.update() == []


def test_a_long_silence_is_news_once(tmp_path):
    groups = recorded(tmp_path, 3)
    for silent, said in (((0, 2), "groups 0 and 2"), ((1,), "group 1")):
        for replica_id in silent:
            write_group(tmp_path, replica_id, trained_at=time.time() - 300)
        assert groups.update() == [f"{said}: no step for 2 min"]
        assert groups.update() == []


def test_a_difference_is_news_once_and_again_after_it_has_ended(tmp_path):
    groups, said = recorded(tmp_path, 2), []
    for step, digest in [(3, "cd"), (4, "cd"), (5, "ab"), (6, "cd")]:
        write_group(tmp_path, 0, syncs=[sync_line(step)])
        write_group(tmp_path, 1, syncs=[sync_line(step, digest=digest)])
        said += groups.update()
    assert said == [f"the groups' parameters DIFFER at step {step}" for step in (3, 6)]
