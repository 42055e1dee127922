"""What is said about all groups together. Run: pytest tests/launch/test_overview.py."""

import time

import pytest
from recorded_groups import recorded, sync_line, view_of, write_group

from composer_replication.launch.overview import (
    compared,
    overview,
    participants,
    status_line,
    wrong,
)


@pytest.mark.parametrize(
    ("other", "verdict"),
    [("ab", "equal at step 1: abababab"), ("cd", "DIFFERENT at step 1")],
)
def test_the_digests_of_the_last_step_that_all_have_are_compared(tmp_path, other, verdict):
    ahead = write_group(tmp_path, 0, syncs=[sync_line(1), sync_line(2, digest="ef")])
    behind = write_group(tmp_path, 1, syncs=[sync_line(1, digest=other)], outer_step=1)
    groups = [view_of(ahead), view_of(behind)]
    assert overview(groups) == f"outer step 2: 2 of 2 groups, parameters {verdict}"


def test_one_group_and_groups_without_digests_are_not_compared(tmp_path):
    assert compared(recorded(tmp_path / "one", 1)) is None
    folders = [write_group(tmp_path, i, syncs=[sync_line(2, digest=None)]) for i in range(2)]
    assert overview([view_of(f) for f in folders]) == "outer step 2: 2 of 2 groups"


def test_the_participants_are_those_of_the_newest_sync(tmp_path):
    left = write_group(tmp_path, 0, syncs=[sync_line(3, participants=1)], outer_step=3)
    others = [
        write_group(tmp_path, i, syncs=[sync_line(8, participants=2)], outer_step=8) for i in (1, 2)
    ]
    groups = [view_of(left), *map(view_of, others)]
    assert participants(groups) == 2
    assert overview(groups).startswith("outer step 8: 2 of 3 groups")


def test_before_the_first_sync_there_is_nothing_to_say(tmp_path):
    groups = [view_of(tmp_path / f"replica_{i}") for i in range(2)]
    assert (overview(groups), participants(groups)) == ("", None)
    assert status_line(groups) == "starting"


def test_one_line_has_the_run_and_no_line_is_longer_for_more_groups(tmp_path):
    two = status_line(recorded(tmp_path / "two", 2))
    assert two == (
        "outer step 2: 2 of 2 groups, round 2 / 20, loss 3.142, 1 min 15 s left, "
        "parameters equal: abababab"
    )
    assert len(status_line(recorded(tmp_path / "many", 64))) == len(two) + 2


def test_the_line_has_the_range_of_losses_and_the_slowest_groups_time(tmp_path):
    groups = []
    for i in range(3):
        place = {
            "round": 2.0 + i,
            "inner_steps": 20 + 10 * i,
            "batch": 20 + 10 * i,
            "seconds_left": 60.0 * i,
        }
        groups.append(view_of(write_group(tmp_path, i, loss=3.0 - i / 2, **place)))
    assert status_line(groups) == "round 4 / 20, loss 2.000 to 3.000, 2 min 0 s left"


@pytest.mark.parametrize("phase", ["restarting", "left out"])
def test_a_group_that_died_does_not_count_with_its_old_values(tmp_path, phase):
    syncs = [sync_line(step) for step in (1, 2)]
    place = {"outer_step": 2, "loss": 2.0, "seconds_left": 30.0}
    folders = [write_group(tmp_path, i, syncs=syncs, **place) for i in range(2)]
    dead = write_group(tmp_path, 2, syncs=[sync_line(1, digest="cd")], phase=phase)
    line = status_line([view_of(folder) for folder in (*folders, dead)])
    assert ", loss 2.000, 30 s left, parameters equal: abababab, group 2 " in line


def test_what_is_wrong_is_named_with_its_groups(tmp_path):
    now = time.time()
    states = [{}, {"trained_at": now - 3000}, {"trained_at": now - 3000}, {"phase": "left out"}]
    groups = [view_of(write_group(tmp_path, i, **state)) for i, state in enumerate(states)]
    assert wrong(groups) == "group 1, 2 no step for 50 min, group 3 left out"
    assert status_line(groups).endswith(wrong(groups))
