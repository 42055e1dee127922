"""A run's events, and what heartbeats have said over time. Run: pytest
tests/coordinator/test_events.py"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from composer_replication.coordinator.events import Events, Heartbeats
from composer_replication.util.curves import MAX_POINTS


@pytest.fixture
def events(database):
    return Events(database)


@pytest.fixture
def history():
    return Heartbeats()


def texts(events):
    return [event["text"] for event in events.newest()]


def test_the_newest_events_are_shown_and_more_are_kept(events, database, monkeypatch):
    monkeypatch.setattr(Events, "KEPT", 60)
    for number in range(70):
        events.add(f"event {number}")
    assert texts(events) == [f"event {number}" for number in range(20, 70)]
    with database.transaction() as cursor:
        assert cursor.execute("SELECT count(*) FROM events").fetchone() == (60,)


def test_a_request_that_was_served_is_answered_on_a_full_disk_too(events, database, caplog):
    with database.transaction() as cursor:
        (pages,) = cursor.execute("PRAGMA page_count").fetchone()
        cursor.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(300):
        events.try_to_add(f"event {number} {'x' * 100}")
    assert "That event is in the log alone" in caplog.text


def test_a_long_curve_is_thinned_and_keeps_its_newest_point(history):
    for batch in range(5 * MAX_POINTS):
        history.add("0", {"batch": batch, "loss": 1.0})
    points = history.losses()["0"]
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS and points[-1][0] == 5 * MAX_POINTS - 1
    assert len({after[0] - before[0] for before, after in pairwise(points[:-1])}) == 1


def test_a_batch_that_is_reported_again_is_one_point_also_after_a_resume(history):
    for batch, loss in [(0, 4.9), (10, 9.0), (20, 9.0), (20, 9.0), (10, 4.8), (20, 4.7)]:
        history.add("0", {"batch": batch, "loss": loss})
    assert history.losses()["0"] == [(0, 4.9), (10, 4.8), (20, 4.7)]


def tell(history, group, step, digest):
    history.add(group, {"digest_step": step, "global_digest": digest})


def test_digests_are_compared_at_the_newest_outer_step_that_several_groups_have_reported(history):
    assert history.agreement() is None
    tell(history, "0", 10, "aa")
    assert history.agreement() is None
    tell(history, "1", 10, "aa")
    tell(history, "0", 20, "bb")
    equal = {"outer_step": 10, "digests": {"0": "aa", "1": "aa"}, "differing": []}
    assert history.agreement() == equal
    tell(history, "1", 20, "cc")
    differing = history.agreement()
    assert (differing["outer_step"], differing["differing"]) == (20, [20])


def test_after_a_resume_digests_from_before_it_are_not_compared(history):
    for step in (10, 20):
        for group in "01":
            tell(history, group, step, f"first {step}")
    tell(history, "0", 10, "again")  # the group's own digest of this outer step has changed
    assert history.agreement() is None
    tell(history, "1", 10, "again")
    assert history.agreement()["differing"] == []


def test_losses_are_read_while_heartbeats_add_groups(history):
    with ThreadPoolExecutor() as pool:
        added = pool.map(lambda n: history.add(str(n), {"batch": 1, "loss": 1.0}), range(3000))
        while len(history.losses()) < 3000:
            pass
    assert len([*added]) == 3000
