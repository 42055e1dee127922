"""What heartbeats have said over time. Run: pytest tests/coordinator/test_run_history.py"""

import pytest

from composer_replication.coordinator.run_history import MAX_POINTS, RunHistory


@pytest.fixture
def history():
    return RunHistory()


def test_a_new_history_is_empty(history):
    assert (history.losses(), history.syncs(), history.lives("0")) == ({}, [], [])


def test_a_long_curve_is_thinned_and_keeps_its_newest_point(history):
    for batch in range(5 * MAX_POINTS):
        history.add("0", {"batch": batch, "loss": 1.0})
    points = history.losses()["0"]
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS and points[-1][0] == 5 * MAX_POINTS - 1
    gaps = {b[0] - a[0] for a, b in zip(points, points[1:], strict=False)}
    assert max(gaps) <= 16
    assert len(history._losses["0"]) <= 4 * MAX_POINTS  # however long the run is


def test_syncs_are_by_outer_step_whoever_reports_them(history):
    sync = {"synced_step": 3, "synced_batch": 60, "num_participants": 2, "group_cosine": 0.5}
    history.add("0", sync | {"sync_seconds": 0.1})
    history.add("1", sync | {"sync_seconds": 0.3})
    history.add("1", {"synced_step": 2, "synced_batch": 40})
    assert history.syncs() == [
        {"outer_step": 2, "batch": 40},
        {"outer_step": 3, "batch": 60, "num_participants": 2, "group_cosine": 0.5}
        | {"sync_seconds": 0.3},
    ]
