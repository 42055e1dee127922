"""How long a group waits for members that a quorum lacks.

Faked are the lighthouse's status page and the clock.
Run: pytest tests/replica/test_missing_members.py
"""

import logging
import math
from types import SimpleNamespace

import pytest

from composer_replication.replica import quorum_member
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.quorum_member import MissingMembers


class Situation:
    """A group that waits for ``b`` and ``c``; ``heard_from``: since when the lighthouse hears of
    each member, in seconds."""

    def __init__(self, monkeypatch, **heard_from):
        self.now, self._heard_from, self.died = 0.0, heard_from, {}
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(quorum_member, "time", clock)
        self.missing = MissingMembers(self._read_alive)
        self.missing.add_all(["b:1", "c:1"])

    def _sleep(self, seconds):
        self.now += seconds

    def _read_alive(self):
        return frozenset(
            f"{letter}:1"
            for letter, at in self._heard_from.items()
            if at <= self.now < self.died.get(letter, math.inf)
        )

    def wait(self, began=0.0):
        """The members still waited for, and the seconds that it took."""
        before = self.now
        self.missing.wait(began)
        return set(self.missing.names), pytest.approx(self.now - before, abs=0.11)


def test_members_that_are_heard_of_in_time_are_still_waited_for(monkeypatch):
    situation = Situation(monkeypatch, a=0.0, b=1.0, c=4.0)
    assert situation.wait() == ({"b:1", "c:1"}, 4.0)
    assert situation.wait() == ({"b:1", "c:1"}, 0.1)  # and the quorum is asked for again at once


def test_a_member_that_the_lighthouse_does_not_hear_of_for_seconds_has_died(monkeypatch, caplog):
    situation = Situation(monkeypatch, a=0.0, b=1.0, c=6.0)
    with caplog.at_level(logging.WARNING):
        assert situation.wait() == ({"b:1"}, MissingMembers.HEARTBEAT_WITHIN_S)
    assert caplog.messages == ["Going on without those that the lighthouse has not heard of: c"]


def test_a_member_whose_heartbeats_have_stopped_is_given_up_sooner(monkeypatch, caplog):
    situation = Situation(monkeypatch, a=0.0, b=0.0, c=1.0)
    situation.wait()
    situation.died = {"b": situation.now}
    with caplog.at_level(logging.WARNING):
        assert situation.wait() == ({"c:1"}, MissingMembers.GONE_WITHIN_S)
    assert caplog.messages == ["Going on without those that the lighthouse has not heard of: b"]


def test_after_a_restart_the_lighthouse_has_to_hear_of_a_member_anew(monkeypatch):
    situation = Situation(monkeypatch, a=0.0, b=0.0, c=1.0)
    situation.wait()
    situation.missing.add_all(["b:1", "c:1"])
    situation.died = {"b": situation.now}
    assert situation.wait() == ({"c:1"}, MissingMembers.HEARTBEAT_WITHIN_S)


def test_a_lighthouse_that_is_away_again_lets_nobody_die(monkeypatch):
    situation = Situation(monkeypatch)
    assert situation.wait() == ({"b:1", "c:1"}, MissingMembers.HEARTBEAT_WITHIN_S)


def test_an_earlier_deadline_ends_the_wait(monkeypatch):
    situation = Situation(monkeypatch, a=0.0, b=0.0, c=0.0)
    situation.missing.deadline = 5.0
    assert situation.wait() == ({"b:1", "c:1"}, 0.1)
    situation.now = 5.0
    assert situation.wait() == (set(), 0.1)


def test_with_a_page_that_cannot_be_read_a_group_does_not_wait_for_ever(monkeypatch, caplog):
    # A proxy, or a firewall that lets gRPC through only: nobody is heard of.
    situation = Situation(monkeypatch)
    situation.now = STRAGGLER_TIMEOUT_S
    with caplog.at_level(logging.WARNING):
        assert situation.wait()[0] == set()
    assert "was not asked for a quorum by: b, c" in caplog.text


def test_a_member_that_lives_and_asks_for_no_quorum_is_waited_for_like_any_straggler(
    monkeypatch, caplog
):
    situation = Situation(monkeypatch, a=0.0, b=0.0, c=0.0)
    situation.now = STRAGGLER_TIMEOUT_S - 1.0
    assert situation.wait() == ({"b:1", "c:1"}, 0.1)
    situation.now += 1.0
    with caplog.at_level(logging.WARNING):
        assert situation.wait() == (set(), 0.1)
    assert caplog.messages == [
        "Going on without those that the lighthouse was not asked for a quorum by: b, c"
    ]
