"""How long a manager awaits whom a restarted lighthouse has not heard of, or has not been asked by.

Faked are the lighthouse's status page and the clock. Run: pytest tests/replica/test_manager.py
"""

import logging
from types import SimpleNamespace

import pytest

from composer_replication.replica import manager as replica_manager
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S, LighthouseStatus
from composer_replication.replica.manager import ReplicaManager


class Situation:
    """A manager that awaits ``b`` and ``c``; ``heard_from`` says from when on each is heard of."""

    def __init__(self, monkeypatch, **heard_from):
        self.now, self._heard_from = 0.0, heard_from
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(replica_manager, "time", clock)
        monkeypatch.setattr(replica_manager, "read_status", self._read_status)
        self.manager = ReplicaManager.__new__(ReplicaManager)  # its wait alone, without a run
        self.watch = SimpleNamespace(awaits=frozenset({"b:1", "c:1"}), awaits_until=None)
        self.manager._watch = self.watch

    def _sleep(self, seconds):
        self.now += seconds

    def _read_status(self, _):
        heard = {f"{letter}:1" for letter, at in self._heard_from.items() if self.now >= at}
        return LighthouseStatus(alive=frozenset(heard))

    def wait(self, began=0.0):
        """Those still awaited, and the seconds that it took."""
        before = self.now
        self.manager._wait_for_the_awaited(began)
        return set(self.watch.awaits), pytest.approx(self.now - before, abs=0.11)


def test_those_that_are_heard_of_in_time_are_awaited_on(monkeypatch):
    situation = Situation(monkeypatch, a=0.0, b=1.0, c=4.0)
    assert situation.wait() == ({"b:1", "c:1"}, 4.0)
    assert situation.wait() == ({"b:1", "c:1"}, 0.1)  # and the quorum is asked for again at once


def test_whom_the_lighthouse_has_not_heard_of_for_some_seconds_has_died(monkeypatch, caplog):
    situation = Situation(monkeypatch, a=0.0, b=1.0, c=6.0)
    with caplog.at_level(logging.WARNING):
        assert situation.wait() == ({"b:1"}, ReplicaManager.HEARD_WITHIN_S)
    assert caplog.messages == ["Going on without those that the lighthouse has not heard of: c"]


def test_a_lighthouse_that_is_away_again_lets_nobody_die(monkeypatch):
    situation = Situation(monkeypatch)
    assert situation.wait() == ({"b:1", "c:1"}, ReplicaManager.HEARD_WITHIN_S)


def test_a_watch_that_awaits_for_less_is_followed(monkeypatch):
    situation = Situation(monkeypatch, a=0.0, b=0.0, c=0.0)
    situation.watch.awaits_until = 5.0
    assert situation.wait() == ({"b:1", "c:1"}, 0.1)
    situation.now = 5.0
    assert situation.wait() == (set(), 0.1)


def test_a_page_that_can_never_be_read_does_not_have_a_group_wait_for_ever(monkeypatch, caplog):
    # A proxy, or a firewall that lets gRPC through only: nobody is heard of.
    situation = Situation(monkeypatch)
    situation.now = STRAGGLER_TIMEOUT_S
    with caplog.at_level(logging.WARNING):
        assert situation.wait()[0] == set()
    assert "was not asked for a quorum by: b, c" in caplog.text


def test_whoever_lives_and_asks_for_no_quorum_is_awaited_as_long_as_any_straggler(
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
