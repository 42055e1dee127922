"""Which quorums are used, and under which connections, after a lighthouse has been restarted.

Faked is the lighthouse: a script says who is in the next quorum and under which id.
"""

import json
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from types import SimpleNamespace

import pytest

from composer_replication.options import DuplicateIdError
from composer_replication.replica import quorum_members
from composer_replication.replica.group_layout import GroupLayout
from composer_replication.replica.messages import proof
from composer_replication.replica.peer_server import PeerServer
from composer_replication.replica.quorum_members import (
    MissingMembers,
    SyncFaults,
    UnreachableMembers,
    at_fault,
    members_to_leave_out,
)
from composer_replication.replica.quorum_reports import PreviousQuorum, Report, write_handle
from composer_replication.replica.quorum_watch import (
    AtFaultError,
    QuorumDeclined,
    QuorumFailed,
    QuorumWatch,
)

VOTE = timedelta(seconds=10)
HANDLE = '{"store": "host:1"}'


def watch_of(
    client,
    letter,
    reconnect=lambda: None,
    world_size=1,
    token="secret",
    unreachable=None,
):
    manager = f"http://{letter}"
    board = f"{letter}:2"
    layout, missing = GroupLayout(world_size), MissingMembers(frozenset)
    return QuorumWatch(
        client,
        f"{letter}:1",
        manager,
        board,
        reconnect,
        VOTE,
        layout,
        missing,
        unreachable or UnreachableMembers(lambda handles: (), 1),
        [token],
    )


def handle_of(letter, report=None, token="secret"):
    return write_handle(HANDLE, report or Report(), f"{letter}:1", token)


class Groups:
    """Replica groups by one letter each; ``a`` is called ``a:1`` by the lighthouse.

    Addresses of the members in ``dead`` do not answer when they are tried again.
    """

    def __init__(self, letters, min_replica_size=1):
        self._reconnects, self._min_replica_size, self.dead = set(), min_replica_size, set()
        self.commit_failures = {}
        self.watch = {letter: self._watch(letter) for letter in letters}

    def _watch(self, letter):
        client = SimpleNamespace(_quorum=self._wait_for_all, should_commit=None)
        unreachable = UnreachableMembers(
            lambda handles: tuple(name for name in handles if name in self.dead),
            self._min_replica_size,
        )
        reconnect = lambda: self._reconnects.add(letter)  # noqa: E731
        return watch_of(client, letter, reconnect, unreachable=unreachable)

    def replace(self, letter):
        """Its process is another one now."""
        self.watch[letter] = self._watch(letter)

    def _wait_for_all(self, group_rank, step, reconfigure_handle, commit_failures):
        self._handles[group_rank] = reconfigure_handle
        self.commit_failures[group_rank] = commit_failures
        self._barrier.wait(10.0)
        return SimpleNamespace(
            quorum_id=self._id,
            replica_rank=self._letters.index(group_rank),
            max_step=step,
            store_address="",
            replica_ids=[f"{letter}:1" for letter in self._letters],
            reconfigure_handles=[self._handles[letter] for letter in self._letters],
        )

    def quorum(self, quorum_id, letters, fails="", left_out=""):
        """What becomes of this quorum: declined, kept or connected.

        Members in ``fails`` cannot connect. Those in ``left_out`` decline and the others do not.
        """
        self._id, self._letters, self._handles = quorum_id, letters, {}
        self._barrier = Barrier(len(letters))
        self._reconnects.clear()
        with ThreadPoolExecutor(len(letters)) as threads:
            outcomes = dict(zip(letters, threads.map(self._ask, letters), strict=True))
        assert all(outcomes.pop(letter) == "declined" for letter in left_out)
        for letter, outcome in outcomes.items():
            if outcome == "connected":
                self.watch[letter].disconnected()
                if letter not in fails:
                    self.watch[letter].connected(quorum_id, hash(tuple(self._handles.items())))
        assert len(set(outcomes.values())) == 1, f"members are not of one mind: {outcomes}"
        return next(iter(outcomes.values()))

    def _ask(self, letter):
        try:
            self.watch[letter]._quorum(
                group_rank=letter, step=1, reconfigure_handle=HANDLE, commit_failures=1
            )
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
    assert groups.watch["a"].missing.names == {"b:1", "c:1"}
    assert groups.quorum(2, "ab") == "declined"
    assert groups.quorum(3, "ab") == "declined"
    assert groups.quorum(4, "abc") == "connected"  # though c knows of no restart
    assert not groups.watch["a"].missing.names and not groups.watch["b"].missing.names


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
    groups.watch["a"].missing.names = frozenset()  # they were away for too long
    assert groups.quorum(1, "a") == "connected"
    assert groups.quorum(2, "abc") == "connected"
    assert groups.quorum(2, "abc") == "kept"


def test_a_joiner_declines_with_those_that_were_there_before():
    groups = Groups("abcd")
    groups.quorum(3, "abc")
    assert groups.quorum(1, "d") == "connected"  # all by itself: its cold start is DiLoCo's
    assert groups.quorum(2, "bd") == "declined"
    assert groups.watch["b"].missing.names == {"a:1", "c:1"}
    assert groups.quorum(2, "bd") == "declined"
    assert groups.watch["d"].missing.names == {"a:1", "c:1"}
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
    assert groups.watch["a"].missing.names == {"b:1", "c:1"}
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
    groups.watch["a"].missing.names = frozenset()  # it has not heard of c for five seconds
    assert groups.quorum(1, "ab") == "declined"  # b has
    groups.watch["a"].missing.names = groups.watch["b"].missing.names = frozenset()
    assert groups.quorum(1, "ab") == "connected"
    groups.replace("c")
    assert groups.quorum(2, "abc") == "connected"


def quorum_with(*others, quorum_id=3):
    """A client whose quorum has ``a``, in the first place, and others by name and handle."""

    def quorum(reconfigure_handle, step, **_):
        return SimpleNamespace(
            quorum_id=quorum_id,
            replica_rank=0,
            replica_world_size=1 + len(others),
            store_address="",
            max_step=10**6,
            replica_ids=["a:1", *(name for name, _ in others)],
            reconfigure_handles=[reconfigure_handle, *(handle for _, handle in others)],
            heal=True,
        )

    return SimpleNamespace(_quorum=quorum, should_commit=None)


def signed(**changes):
    """A handle of a member that knows the token and writes nonsense."""
    content = {**json.loads(handle_of("b")), **changes}
    del content["proof"]
    return json.dumps(content | {"proof": proof("secret", "report", "b:1", content)})


NONSENSE = [
    "",
    "no JSON",
    "[" * 100_000,
    "3",
    '["last"]',
    "{}",
    HANDLE,
    '{"store": "host:1", "proof": "\u00fc"}',
    signed(store=None),
    signed(previous=7),
    signed(previous=["9", "x"]),
    signed(previous={"9": 1}),
    signed(previous=[9]),
    signed(previous=[9, [], 1]),
    signed(previous=[9, [7]]),
    signed(previous=[9, [["a"]]]),
    signed(missing=5),
    signed(left_out=3),
    signed(left_out=[3]),
    signed(missing=None),
    signed(missing=[["b:1"]]),
    signed(connection=[1]),
    signed(connection=["1", 2, 3]),
    signed(step="1"),
    signed(unreachable=[3]),
    signed(has_failed="yes"),
]


@pytest.mark.parametrize("handle", NONSENSE, ids=range(len(NONSENSE)))
def test_a_member_whose_handle_cannot_be_understood_is_left_out(handle, caplog):
    reconnects = []
    watch = watch_of(quorum_with(("b:1", handle)), "a", lambda: reconnects.append(1))
    quorum = watch._quorum(group_rank=0, step=4, reconfigure_handle=HANDLE)
    assert quorum.replica_ids == ["a:1"] and quorum.replica_world_size == 1
    assert quorum.max_step == 4 and not quorum.heal  # whatever step the other one claims
    assert watch.members == ("a:1",) and not watch.missing.names and reconnects == [1]
    assert "Left 'b:1' out of the quorum" in caplog.text


def test_a_well_formed_handle_is_not_nonsense():
    watch = watch_of(quorum_with(("b:1", signed())), "a")
    assert watch._quorum(group_rank=0, step=4, reconfigure_handle=HANDLE).replica_ids == [
        "a:1", "b:1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "handle"),
    [
        ("b:1", handle_of("b", token="another")),
        ("c:1", handle_of("b")),  # another member's handle, used by a stranger
    ],
)
def test_who_does_not_prove_the_token_is_left_out_and_named_once(name, handle, caplog):
    watch = watch_of(quorum_with((name, handle), ("d:1", handle_of("d", Report(step=4)))), "a")
    for _ in range(2):
        quorum = watch._quorum(group_rank=0, step=4, reconfigure_handle=HANDLE)
        assert quorum.replica_ids == ["a:1", "d:1"] and quorum.replica_rank == 0
    assert caplog.text.count("does not prove that it knows this run's token") == 1


def test_nobody_waits_for_a_stranger_that_does_not_come_again():
    others = [("x:1", "a stranger"), ("b:1", handle_of("b"))]
    watch = watch_of(quorum_with(*others), "a")
    watch.missing.read_alive = lambda: frozenset({"a:1", "b:1", "x:1"})
    watch._quorum(group_rank=0, step=4, reconfigure_handle=HANDLE)
    del others[0]
    watch._client = quorum_with(*others, quorum_id=10)
    quorum = watch._quorum(group_rank=0, step=4, reconfigure_handle=HANDLE)  # and not declined
    assert quorum.replica_ids == ["a:1", "b:1"]


def test_while_a_token_is_replaced_both_are_accepted():
    client = quorum_with(("b:1", handle_of("b", token="new")), ("c:1", handle_of("c", token="old")))
    layout, missing = GroupLayout(1), MissingMembers(frozenset)
    unreachable = UnreachableMembers(lambda handles: (), 1)
    watch = QuorumWatch(
        client, "a:1", "", "", lambda: None, VOTE, layout, missing, unreachable, ["new", "old"]
    )
    quorum = watch._quorum(group_rank=0, step=0, reconfigure_handle=HANDLE)
    assert quorum.replica_ids == ["a:1", "b:1", "c:1"]


def test_beside_a_stranger_joiners_heal_from_members_in_turns():
    others = [
        ("x:1", "a stranger"),
        ("b:1", handle_of("b", Report(step=7, manager="http://b"))),
        ("c:1", handle_of("c", Report(step=2))),
        ("d:1", handle_of("d", Report(step=7, manager="http://d"))),
    ]
    quorum = watch_of(quorum_with(*others), "a")._quorum(
        group_rank=0, step=2, reconfigure_handle=HANDLE
    )
    assert quorum.replica_ids == ["a:1", "b:1", "c:1", "d:1"] and quorum.max_step == 7
    assert quorum.heal and quorum.recover_src_manager_address == "http://b"
    assert quorum.recover_src_replica_rank == 1 and quorum.recover_dst_replica_ranks == []
    donor = watch_of(quorum_with(*others), "a")._quorum(
        group_rank=1, step=7, reconfigure_handle=HANDLE
    )
    assert not donor.heal and donor.max_world_size == 3 and donor.max_replica_rank == 0
    assert donor.recover_dst_replica_ranks == []  # c's turn is the second of three, which is b


def test_somebody_who_asks_in_this_groups_name_gives_no_quorum():
    client = SimpleNamespace(_quorum=quorum_with()._quorum, should_commit=None)
    ask = client._quorum
    client._quorum = lambda **request: ask(**request | {"reconfigure_handle": handle_of("b")})
    with pytest.raises(QuorumFailed, match="in the name of this group, 'a:1'"):
        ask_alone(client)


def unreachable(*letters):
    return Report(step=1, unreachable=tuple(f"{letter}:1" for letter in letters))


@pytest.mark.parametrize(
    ("reports", "culprit"),
    [
        ({"a": Report(), "b": Report()}, None),
        ({"a": unreachable("c"), "b": unreachable("c"), "c": unreachable("c")}, "c:1"),
        ({"a": unreachable("c"), "b": unreachable("c"), "c": unreachable()}, "c:1"),
        ({"a": unreachable("b", "c"), "b": unreachable(), "c": unreachable()}, "a:1"),
        ({"a": unreachable(), "b": unreachable("c"), "c": unreachable("b")}, "c:1"),
        ({"a": unreachable(), "b": unreachable(), "c": unreachable("b")}, "b:1"),
        ({"a": unreachable("b"), "b": unreachable("a")}, "b:1"),
        ({"a": Report(step=0, unreachable=("b:1",)), "b": unreachable("a")}, "a:1"),
        ({"a": Report(has_failed=True), "b": unreachable("c"), "c": unreachable("b")}, "a:1"),
        ({"a": unreachable("d"), "b": unreachable()}, None),  # d has gone meanwhile
    ],
)
def test_a_failed_sync_is_blamed_on_one_member_by_all(reports, culprit):
    named = {f"{letter}:1": report for letter, report in reports.items()}
    assert at_fault(named) == culprit
    assert at_fault(dict(reversed(named.items()))) == culprit


def test_the_member_at_fault_leaves_after_a_time_and_the_others_count_nothing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(quorum_members, "time", SimpleNamespace(monotonic=lambda: now[0]))
    groups = Groups("abc", min_replica_size=3)  # so that nobody is left out
    groups.quorum(1, "abc")
    limit = SyncFaults.LEAVES_AFTER_S
    for seconds in [0.0, limit / 2, limit]:
        now[0] = seconds
        for letter in "ab":
            groups.watch[letter].faults.unreachable = ("c:1",)
        groups.quorum(1, "abc")
        assert [groups.watch[letter].faults.blamed for letter in "abc"] == [
            "another",
            "another",
            "this",
        ]
    groups.quorum(1, "abc")  # it was well once
    assert [groups.watch[letter].faults.blamed for letter in "abc"] == [None] * 3
    for seconds in [limit, limit + 1.0, 2 * limit + 1.0]:
        now[0] = seconds
        groups.watch["a"].faults.unreachable = groups.watch["b"].faults.unreachable = ("c:1",)
        groups.quorum(1, "abc")
    groups.quorum(1, "abc")  # the sync in that quorum has ended well
    for seconds in [3 * limit, 4 * limit + 1.0]:
        now[0] = seconds
        groups.watch["a"].faults.unreachable = groups.watch["b"].faults.unreachable = ("c:1",)
        groups.quorum(1, "abc")
    groups.watch["c"].disconnected()
    with pytest.raises(AtFaultError, match="for 31 s syncs have failed .* a, b cannot reach it"):
        groups.watch["c"]._quorum(group_rank="c", step=1, reconfigure_handle=HANDLE)


def test_a_failure_after_which_a_member_has_gone_or_come_is_nobody_elses_to_count():
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.quorum(1, "abc")
    assert groups.watch["a"].faults.blamed is None
    groups.quorum(2, "ab")
    assert groups.watch["a"].faults.blamed == groups.watch["b"].faults.blamed == "another"


def eventually(condition):
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_member_that_cannot_be_reached_is_left_out_until_it_can(monkeypatch, caplog):
    monkeypatch.setattr(UnreachableMembers, "RECHECK_EVERY_S", 0.01)
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.dead = {"c:1"}
    for letter in "ab":  # as when they connect
        groups.watch[letter].faults.unreachable = ("c:1",)
    assert groups.quorum(1, "abc", left_out="c") == "connected"
    assert groups.watch["a"].members == groups.watch["b"].members == ("a:1", "b:1")
    assert groups.quorum(1, "abc", left_out="c") == "kept"
    # With a count above 0 the lighthouse would give an id that makes the others connect anew.
    assert groups.commit_failures == {"a": 1, "b": 1, "c": 0}
    assert caplog.text.count("Syncs go on without group c: a, b cannot reach it") == 3  # each once
    groups.dead.clear()
    eventually(lambda: not any(groups.watch[each].unreachable.reported for each in "ab"))
    assert groups.quorum(3, "abc") == "connected"
    assert groups.watch["c"].members == ("a:1", "b:1", "c:1")
    assert groups.quorum(3, "abc") == "kept"


def test_nobody_waits_for_a_member_that_is_left_out_and_asks_late():
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.dead = {"a:1"}
    groups.watch["c"].faults.unreachable = ("a:1",)
    for letter in "abc":
        groups.watch[letter].missing.read_alive = lambda: frozenset({"a:1", "b:1", "c:1"})
    assert groups.quorum(1, "abc", left_out="a") == "connected"
    assert groups.quorum(2, "bc") == "connected"  # and not declined


@pytest.mark.parametrize(
    ("min_replica_size", "reports", "left_out"),
    [
        (1, {"a": Report(), "b": Report()}, ""),
        (1, {"a": unreachable("b"), "b": unreachable("a")}, "b"),
        (2, {"a": unreachable("b"), "b": unreachable("a")}, ""),
        (1, {"a": unreachable("c", "d"), "b": unreachable("c", "d"), "c": Report(step=1),
             "d": Report(step=1)}, "cd"),
        (3, {"a": unreachable("c", "d"), "b": unreachable("c", "d"), "c": Report(step=1),
             "d": Report(step=1)}, ""),
        (1, {"a": unreachable("c"), "b": Report(has_failed=True), "c": Report(step=1)}, ""),
        (1, {"a": unreachable("b"), "b": Report(step=0)}, "b"),  # a joiner that is not reached
        # The only one with the newest parameters stays: without it outer steps would be lost.
        (1, {"a": Report(step=0, unreachable=("c:1",)), "b": Report(step=0, unreachable=("c:1",)),
             "c": Report(step=1)}, "ab"),
    ],
)  # fmt: skip
def test_who_is_left_out(min_replica_size, reports, left_out):
    named = {f"{letter}:1": report for letter, report in reports.items()}
    expected = {f"{letter}:1" for letter in left_out}
    assert members_to_leave_out(named, min_replica_size) == expected


class Ranks:
    """Two ranks of group a, and their manager server: a quorum, then a vote of the two."""

    def __init__(self):
        self._votes, self._barrier = {}, Barrier(2)
        client = SimpleNamespace(_quorum=self._quorum, should_commit=self._vote)
        self.watches = [watch_of(client, "a", world_size=2) for _ in range(2)]

    def _quorum(self, group_rank, step, reconfigure_handle):
        del group_rank
        peers_handle = handle_of("b", Report(num_ranks=2))
        return SimpleNamespace(
            quorum_id=self._id,
            replica_rank=0,
            max_step=step,
            replica_ids=[f"{letter}:1" for letter in self._letters],
            reconfigure_handles=[reconfigure_handle, peers_handle][: len(self._letters)],
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
            self.watches[rank]._quorum(group_rank=rank, step=7, reconfigure_handle=HANDLE)
        except QuorumDeclined:
            return "declined"
        return "used"


def test_after_a_lighthouse_stood_still_the_first_to_ask_waits_for_those_that_are_alive(caplog):
    # It has heard of nobody for longer than its heartbeat timeout; its ids go on.
    groups = Groups("abc")
    groups.quorum(4, "abc")
    groups.watch["a"].missing.read_alive = lambda: frozenset(
        {"a:1", "b:1"}
    )  # c has died in the same moment
    assert groups.quorum(5, "a") == "declined"
    assert "Asking for a quorum again: b alive, and missing" in caplog.text
    assert groups.quorum(5, "a") == "declined"  # all members of the last quorum have asked
    assert groups.quorum(6, "ab") == "connected"
    assert not groups.watch["a"].missing.names and groups.watch["a"].missing.deadline is None


def test_a_joiner_that_asked_before_the_others_declines_a_quorum_that_lacks_some_of_them():
    # The lighthouse's join timeout began with the joiner's request, and was over when a came.
    groups = Groups("abcj")
    groups.quorum(1, "abc")
    alive = frozenset({"a:1", "b:1", "c:1", "j:1"})
    for letter in "abcj":
        groups.watch[letter].missing.read_alive = lambda: alive
    assert groups.quorum(2, "aj") == "declined"
    # b and c have not been in a quorum with j, and would go on without it.
    assert groups.quorum(3, "abc") == "declined"
    assert groups.quorum(4, "abcj") == "connected"


def test_one_that_is_alive_and_stays_away_is_waited_for_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(quorum_members, "time", SimpleNamespace(monotonic=lambda: now[0]))
    groups = Groups("abc")
    groups.quorum(1, "abc")
    for letter in "ab":
        groups.watch[letter].missing.read_alive = lambda: frozenset({"a:1", "b:1", "c:1"})
    assert groups.quorum(2, "ab") == "declined"  # c was too slow for the lighthouse
    now[0] = MissingMembers.WAIT_FOR_LIVING_S + 1.0
    for letter in "ab":  # as the manager does after that time
        assert groups.watch[letter].missing.deadline < now[0]
        groups.watch[letter].missing.names = frozenset()
    assert groups.quorum(2, "ab") == "connected"
    groups.watch["b"].missing.read_alive = lambda: frozenset({"b:1", "c:1"})
    assert groups.quorum(3, "b") == "connected"  # a has died: it is not on the page


def test_members_that_began_to_wait_at_other_times_stop_together(monkeypatch):
    # A join timeout that is too short gives quorums of two out of three in turn.
    now = [0.0]
    monkeypatch.setattr(quorum_members, "time", SimpleNamespace(monotonic=lambda: now[0]))
    groups = Groups("abc")
    groups.quorum(1, "abc")
    for letter in "abc":
        groups.watch[letter].missing.read_alive = lambda: frozenset({"a:1", "b:1", "c:1"})
    assert groups.quorum(2, "ab") == "declined"
    now[0] = MissingMembers.WAIT_FOR_LIVING_S - 1.0
    assert groups.quorum(3, "bc") == "declined"  # c begins to wait
    now[0] = MissingMembers.WAIT_FOR_LIVING_S + 1.0
    assert groups.quorum(4, "ac") == "connected"  # a has waited, c has not


def test_the_ranks_of_a_group_use_a_quorum_all_or_none():
    ranks = Ranks()
    assert ranks.quorum(2, "ab") == ["used", "used"]
    assert ranks.quorum(1, "a") == ["declined", "declined"]
    ranks.watches[1].missing.names = frozenset()  # by its clock b has been away for five seconds
    assert ranks.quorum(1, "a") == ["declined", "declined"]
    ranks.watches[0].missing.names = frozenset()
    assert ranks.quorum(1, "a") == ["used", "used"]


def ask_alone(client, world_size=1):
    watch = watch_of(client, "a", world_size=world_size)
    watch._quorum(group_rank=0, step=0, reconfigure_handle=HANDLE)


def test_a_rank_whose_other_one_does_not_vote_ends():
    def no_vote(*_, **__):
        raise TimeoutError("Timeout expired")

    client = SimpleNamespace(_quorum=quorum_with()._quorum, should_commit=no_vote)
    with pytest.raises(TimeoutError, match=r"within timeout=10: .* \(Timeout expired\)$"):
        ask_alone(client, world_size=2)


def test_a_lighthouse_that_is_away_is_a_failed_quorum():
    def no_quorum(**_):
        raise RuntimeError("transport error\nand a long story")

    client = SimpleNamespace(_quorum=no_quorum, should_commit=None)
    with pytest.raises(QuorumFailed, match="^transport error$"):
        ask_alone(client)


def test_a_restart_is_logged(caplog):
    groups = Groups("a")
    groups.quorum(4, "a")
    with caplog.at_level(logging.WARNING):
        groups.quorum(1, "a")
    assert caplog.messages == ["The lighthouse has been restarted: quorum id 1 after 4"]


# ---- two groups with one replica id ----------------------------------------------------------


BEFORE = PreviousQuorum(2, ("a:1", "a:2", "b:1"))


def member(name, **report):
    return name, write_handle(HANDLE, Report(**report), name, "secret")


def ask(watch, *others):
    watch._client = quorum_with(*others)
    return watch._quorum(group_rank=0, step=0, reconfigure_handle=HANDLE).replica_ids


@pytest.mark.parametrize(
    ("previous", "others", "used"),
    [
        (BEFORE, [member("a:2", board="far:7"), member("b:1", previous=BEFORE)], "a:1 b:1"),
        (None, [member("a:2", board="far:7")], "a:1"),  # both begin: the name that sorts first
        (BEFORE, [member("b:1", board="far:7"), member("b:2", previous=BEFORE)], "a:1 b:2"),
    ],
)
def test_a_second_holder_of_a_replica_id_is_left_out_by_all_others(caplog, previous, others, used):
    watch = watch_of(quorum_with(), "a")
    watch._previous = previous
    with caplog.at_level(logging.WARNING):
        assert ask(watch, *others) == used.split()
    assert f"Left a second replica group '{others[0][0][0]}', on far, out of" in caplog.text


def test_a_second_holder_leaves_by_name_if_the_first_one_is_alive():
    board = PeerServer("127.0.0.1", ["secret"])
    try:
        with pytest.raises(DuplicateIdError) as error:
            ask(watch_of(quorum_with(), "a"), member("a:2", previous=BEFORE, board=board.address))
    finally:
        board.close()
    assert str(error.value).startswith(
        "replica_id='a' is taken: a living replica group on 127.0.0.1 has it. Give each group"
    )
    assert len(str(error.value)) < 280


def test_a_group_that_was_started_again_waits_for_the_end_of_its_dead_predecessor():
    # It was killed while it asked for a quorum, so the lighthouse has its request.
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    dead = member("a:2", previous=BEFORE, board=address)
    watch = watch_of(quorum_with(), "a")
    for _ in range(2):
        with pytest.raises(QuorumDeclined):
            ask(watch, dead)
    assert ask(watch) == ["a:1"]
