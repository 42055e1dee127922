"""Which quorums are used, and under which connections, after a lighthouse has been restarted.

Faked is the lighthouse: a script says who is in the next quorum and under which id.
"""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace

import pytest

from composer_replication.quorum_watch import QuorumDeclined, QuorumFailed, QuorumWatch

VOTE = timedelta(seconds=10)


class Groups:
    """Replica groups by one letter each; ``a`` is called ``a:1`` by the lighthouse."""

    def __init__(self, letters):
        self._reconnects = set()
        self.watch = {letter: self._watch(letter) for letter in letters}

    def _watch(self, letter):
        client = SimpleNamespace(_quorum=self._wait_for_all, should_commit=None)
        return QuorumWatch(client, letter, lambda: self._reconnects.add(letter), 1, VOTE)

    def replace(self, letter):
        """Its process is another one now."""
        self.watch[letter] = self._watch(letter)

    def _wait_for_all(self, group_rank, reconfigure_handle):
        self._handles[group_rank] = reconfigure_handle
        self._barrier.wait(10.0)
        return SimpleNamespace(
            quorum_id=self._id,
            max_step=1,
            replica_ids=[f"{letter}:1" for letter in self._letters],
            reconfigure_handles=[self._handles[letter] for letter in self._letters],
        )

    def quorum(self, quorum_id, letters, fails=""):
        """What becomes of this quorum: declined, kept or connected; or all of that, by letter."""
        self._id, self._letters, self._handles = quorum_id, letters, {}
        self._barrier = Barrier(len(letters))
        self._reconnects.clear()
        with ThreadPoolExecutor(len(letters)) as threads:
            outcomes = dict(zip(letters, threads.map(self._ask, letters), strict=True))
        for letter, outcome in outcomes.items():
            if outcome == "connected":
                self.watch[letter].disconnected()
                if letter not in fails:
                    self.watch[letter].connected(quorum_id, hash(tuple(self._handles.items())))
        assert len(set(outcomes.values())) == 1, f"members are not of one mind: {outcomes}"
        return outcomes[letters[0]]

    def _ask(self, letter):
        try:
            handle = json.dumps({"id": letter})
            self.watch[letter]._quorum(group_rank=letter, reconfigure_handle=handle)
        except QuorumDeclined:
            return "declined"
        return "connected" if letter in self._reconnects else "kept"


def test_connections_stay_while_the_members_do():
    groups = Groups("abc")
    assert groups.quorum(1, "ab") == "connected"
    assert groups.quorum(1, "ab") == "kept"
    assert groups.quorum(2, "abc") == "connected"
    assert groups.quorum(3, "bc") == "connected"  # a has died: its lighthouse has not
    assert groups.quorum(3, "bc") == "kept"


def test_whoever_has_lost_its_connection_has_all_connect_anew():
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.watch["b"].disconnected()
    assert groups.quorum(1, "abc") == "connected"
    assert groups.quorum(1, "abc") == "kept"
    assert groups.quorum(2, "abc", fails="c") == "connected"
    assert groups.quorum(2, "abc") == "connected"


def test_the_first_to_ask_a_restarted_lighthouse_waits_for_the_others_however_often_it_must_ask():
    groups = Groups("abc")
    groups.quorum(2, "abc")
    assert groups.quorum(1, "a") == "declined"
    assert groups.quorum(1, "a") == "declined"  # all members of the last quorum have asked
    assert groups.watch["a"].awaits == {"b:1", "c:1"}
    assert groups.quorum(2, "ab") == "declined"
    assert groups.quorum(3, "ab") == "declined"
    assert groups.quorum(4, "abc") == "connected"  # though c knows of no restart
    assert not groups.watch["a"].awaits and not groups.watch["b"].awaits


def test_those_to_whom_the_new_ids_look_like_growth_are_told_by_the_others():
    groups = Groups("abc")
    groups.quorum(1, "abc")
    assert groups.quorum(1, "a") == "declined"
    assert groups.quorum(2, "ab") == "declined"


def test_an_id_that_was_used_before_with_the_same_members_does_not_keep_half_of_the_connections():
    # By the id alone b and c would keep what they have, and a wait for them in vain.
    groups = Groups("abc")
    groups.quorum(2, "abc")
    groups.quorum(1, "a")
    groups.watch["a"].awaits = frozenset()  # they were away for too long
    assert groups.quorum(1, "a") == "connected"
    assert groups.quorum(2, "abc") == "connected"
    assert groups.quorum(2, "abc") == "kept"


def test_a_joiner_declines_with_those_that_were_there_before():
    groups = Groups("abcd")
    groups.quorum(3, "abc")
    assert groups.quorum(1, "d") == "connected"  # all by itself: its cold start is DiLoCo's
    assert groups.quorum(2, "bd") == "declined"
    assert groups.watch["b"].awaits == {"a:1", "c:1"}
    assert groups.quorum(2, "bd") == "declined"
    assert groups.watch["d"].awaits == {"a:1", "c:1"}
    assert groups.quorum(3, "abcd") == "declined"  # a and c had another id 3: one more round
    assert groups.quorum(3, "abcd") == "connected"


@pytest.mark.parametrize("first_id", [1, 2])
def test_joiners_that_ask_a_restarted_lighthouse_first_do_not_make_its_ids_look_like_growth(
    first_id,
):
    # The ids of a, b and c go on: 1, then 2 or 3. b and c would lose what they have trained.
    groups = Groups("abcde")
    groups.quorum(1, "abc")
    joiners = "de"[:first_id]
    assert groups.quorum(first_id, joiners) == "connected"
    assert groups.quorum(first_id + 1, "a" + joiners) == "declined"
    assert groups.watch["a"].awaits == {"b:1", "c:1"}
    assert groups.quorum(first_id + 1, "a" + joiners) == "declined"
    assert groups.quorum(first_id + 2, "abc" + joiners) == "connected"


def test_groups_that_were_not_in_the_last_quorum_do_not_look_like_a_restart():
    groups = Groups("abcd")
    groups.quorum(1, "abc")
    groups.quorum(2, "bc")  # a was slow
    groups.quorum(3, "bcd")
    assert groups.quorum(4, "abcd") == "connected"
    groups.quorum(5, "ab")
    groups.quorum(6, "ac")  # b died, and c is back
    assert groups.quorum(7, "acd") == "connected"


def test_groups_that_are_awaited_no_longer_are_not_missed():
    groups = Groups("abc")
    groups.quorum(2, "abc")
    groups.quorum(1, "ab")
    groups.watch["a"].awaits = frozenset()  # it has not heard of c for five seconds
    assert groups.quorum(1, "ab") == "declined"  # b has
    groups.watch["a"].awaits = groups.watch["b"].awaits = frozenset()
    assert groups.quorum(1, "ab") == "connected"
    groups.replace("c")
    assert groups.quorum(2, "abc") == "connected"


@pytest.mark.parametrize(
    "handle",
    [
        "",
        "no JSON",
        "[" * 100_000,
        "3",
        '["last"]',
        "{}",
        '{"last": 7}',
        '{"last": ["9", "x"]}',
        '{"last": {"9": 1}}',
        '{"last": [9]}',
        '{"last": [9, [7]]}',
        '{"last": [9, [["a"]]]}',
        '{"awaits": 5}',
        '{"awaits": null}',
        '{"awaits": "b:1"}',
        '{"awaits": [["b:1"]]}',
        '{"connection": [1]}',
        '{"connection": ["1", 2, 3]}',
        '{"last": [9, "x"], "awaits": 5, "connection": [1]}',
    ],
)
def test_what_a_stranger_tells_that_cannot_be_understood_is_nothing(handle):
    def quorum_with_a_stranger(reconfigure_handle):
        return SimpleNamespace(
            quorum_id=3,
            max_step=1,
            replica_ids=["a:1", "stranger"],
            reconfigure_handles=[reconfigure_handle, handle],
        )

    reconnects = []
    client = SimpleNamespace(_quorum=quorum_with_a_stranger, should_commit=None)
    watch = QuorumWatch(client, "a", lambda: reconnects.append(1), 1, VOTE)
    watch._quorum(reconfigure_handle="{}")
    assert watch.members == ("a:1", "stranger") and not watch.awaits
    assert reconnects == [1]


class Ranks:
    """Two ranks of group a, and their manager server: a quorum, then a vote of the two."""

    def __init__(self):
        self._votes, self._barrier = {}, Barrier(2)
        client = SimpleNamespace(_quorum=self._quorum, should_commit=self._vote)
        self.watches = [QuorumWatch(client, "a", lambda: None, 2, VOTE) for _ in range(2)]

    def _quorum(self, group_rank, step, reconfigure_handle):
        del group_rank, step
        return SimpleNamespace(
            quorum_id=self._id,
            max_step=1,
            replica_ids=[f"{letter}:1" for letter in self._letters],
            reconfigure_handles=[reconfigure_handle] * len(self._letters),
        )

    def _vote(self, group_rank, step, should_commit, timeout):
        assert step == 7 and timeout == VOTE
        self._votes[group_rank] = should_commit
        self._barrier.wait(10.0)
        agreed = all(self._votes.values())
        self._barrier.wait(10.0)
        return agreed

    def quorum(self, quorum_id, letters):
        self._id, self._letters = quorum_id, letters
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(self._ask, range(2)))

    def _ask(self, rank):
        try:
            self.watches[rank]._quorum(group_rank=rank, step=7, reconfigure_handle="{}")
        except QuorumDeclined:
            return "declined"
        return "used"


def test_the_ranks_of_a_group_use_a_quorum_all_or_none():
    ranks = Ranks()
    assert ranks.quorum(2, "ab") == ["used", "used"]
    assert ranks.quorum(1, "a") == ["declined", "declined"]
    ranks.watches[1].awaits = frozenset()  # by its clock b has been away for five seconds
    assert ranks.quorum(1, "a") == ["declined", "declined"]
    ranks.watches[0].awaits = frozenset()
    assert ranks.quorum(1, "a") == ["used", "used"]


def ask_alone(client, world_size=1):
    watch = QuorumWatch(client, "a", lambda: None, world_size, VOTE)
    watch._quorum(group_rank=0, step=0, reconfigure_handle="{}")


def test_a_rank_whose_other_one_does_not_vote_ends():
    quorum = SimpleNamespace(
        quorum_id=1, max_step=0, replica_ids=["a:1"], reconfigure_handles=["{}"]
    )

    def no_vote(*_, **__):
        raise TimeoutError("Timeout expired")

    with pytest.raises(TimeoutError, match=r"within timeout=10: .* \(Timeout expired\)$"):
        ask_alone(SimpleNamespace(_quorum=lambda **_: quorum, should_commit=no_vote), world_size=2)


def test_a_lighthouse_that_is_away_is_a_failed_quorum():
    def no_quorum(**_):
        raise RuntimeError("transport error\nand a long story")

    client = SimpleNamespace(_quorum=no_quorum, should_commit=None)
    with pytest.raises(QuorumFailed, match="^transport error$"):
        ask_alone(client)


def test_a_restart_and_a_name_that_two_have_are_logged(caplog):
    groups = Groups("a")
    groups.quorum(4, "a")
    with caplog.at_level(logging.WARNING):
        groups.quorum(1, "a")
    assert caplog.messages == ["The lighthouse has been restarted: quorum id 1 after 4"]
    caplog.clear()
    groups.watch["a"].members = ("a:1", "a:2")
    groups.watch["a"]._warn_of_twins()
    assert "replica_id='a' is in this quorum twice" in caplog.text
