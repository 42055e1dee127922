"""What members do with the quorums that a script gives them, and what they keep between two.

Faked are the lighthouse, the addresses that answer, and in some tests the clock. What follows from
the reports of one quorum is in test_quorum.py. Run: pytest tests/replica/test_quorum_member.py
"""

import json
import logging
import math
import socket
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from waiting import wait_until

from composer_replication.options import DuplicateIdError
from composer_replication.replica import blame, missing_members
from composer_replication.replica.blame import AtFaultError, Blame
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.missing_members import MissingMembers
from composer_replication.replica.peer_client import proof
from composer_replication.replica.quorum import (
    MemberReport,
    PreviousQuorum,
    QuorumConnection,
    write_handle,
)
from composer_replication.replica.quorum_member import (
    QuorumDeclined,
    QuorumFailed,
    QuorumMember,
    Recheck,
)
from composer_replication.settings import SettingsMismatch

HANDLE = '{"store": "host:1"}'


def member_of(letter, *, tokens=("secret",), find_unreachable=lambda handles: (), **arguments):
    return QuorumMember(
        f"{letter}:1",
        MemberReport(manager=f"http://{letter}", board=f"{letter}:2"),
        tokens,
        MissingMembers(frozenset),
        find_unreachable,
        **{"min_replica_size": 1, "rank": 0, "num_ranks": 1, "store": None} | arguments,
    )


def handle_of(letter, report=None, token="secret"):
    return write_handle(HANDLE, report or MemberReport(), f"{letter}:1", token)


def quorum_of(handles, own, quorum_id=3):
    """A quorum of members by name, as one of them sees it."""
    return SimpleNamespace(
        quorum_id=quorum_id,
        replica_rank=[*handles].index(own),
        replica_ids=[*handles],
        reconfigure_handles=[*handles.values()],
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until somebody sleeps, or a test sets it."""

    def sleep(seconds):
        clock.now += seconds

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(blame, "time", clock)
    monkeypatch.setattr(missing_members, "time", clock)
    return clock


class Groups:
    """Replica groups by one letter each; ``a`` is called ``a:1`` by the lighthouse.

    Addresses of the members in ``dead`` do not answer when they are tried again.
    """

    def __init__(self, letters, min_replica_size=1):
        self.min_replica_size, self.dead = min_replica_size, set()
        self.member = {letter: self.start(letter) for letter in letters}

    def start(self, letter):
        return member_of(
            letter,
            find_unreachable=lambda handles: tuple(self.dead.intersection(handles)),
            min_replica_size=self.min_replica_size,
        )

    def are_alive(self, *letters, to=None):
        """The lighthouse's page shows these members as alive, to all or to some."""
        for letter in to or self.member:
            self.member[letter].missing.read_alive = lambda: frozenset(f"{x}:1" for x in letters)

    def cannot_reach(self, other, *letters):
        """These members have found out, as when they connect, that another one is away."""
        for letter in letters:
            self.member[letter].own.unreachable = (f"{other}:1",)

    def waited_for_by(self, letter):
        return {name[0] for name in self.member[letter].missing.names}

    def blamed(self, letters):
        return [self.member[letter].blame.fault for letter in letters]

    def quorum(self, quorum_id, letters, fails="", left_out=""):
        """What becomes of this quorum: declined, kept or connected.

        Members in ``fails`` cannot connect. Those in ``left_out`` decline and the others do not.
        """
        handles = {f"{each}:1": self.member[each].add_report(HANDLE, 1) for each in letters}
        outcomes = {each: self.use(each, quorum_id, handles) for each in letters}
        assert all(outcomes.pop(letter) == "declined" for letter in left_out)
        for letter, outcome in outcomes.items():
            if outcome == "connected":
                member, number = self.member[letter], hash(tuple(handles.items()))
                connection = QuorumConnection(quorum_id, len(member.reports), number)
                member.own.connection = None if letter in fails else connection
        assert len(set(outcomes.values())) == 1, f"members are not of one mind: {outcomes}"
        return next(iter(outcomes.values()))

    def use(self, letter, quorum_id, handles):
        member = self.member[letter]
        try:
            member.use(quorum_of(handles, member.name, quorum_id), do_ranks_agree=None)
        except QuorumDeclined:
            return "declined"
        return "kept" if member.own.connection else "connected"


# ---- connections ---------------------------------------------------------------------------------


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
    groups.member["b"].own.connection = None
    assert groups.quorum(1, "abc") == "connected"
    assert groups.quorum(1, "abc") == "kept"
    assert groups.quorum(2, "abc", fails="c") == "connected"
    assert groups.quorum(2, "abc") == "connected"


# ---- who is waited for ---------------------------------------------------------------------------


def test_the_first_to_ask_a_restarted_lighthouse_waits_for_the_others_however_often_it_must_ask(
    caplog,
):
    groups = Groups("abc")
    groups.quorum(2, "abc")
    assert groups.quorum(1, "a") == "declined"
    assert caplog.messages == ["The lighthouse has been restarted: quorum id 1 after 2"]
    assert groups.quorum(1, "a") == "declined"  # all members of the last quorum have asked
    assert groups.waited_for_by("a") == {"b", "c"}
    assert groups.quorum(2, "ab") == "declined"
    assert groups.quorum(3, "ab") == "declined"
    assert groups.quorum(4, "abc") == "connected"  # though c knows of no restart
    assert not groups.waited_for_by("a") and not groups.waited_for_by("b")


def test_an_id_that_was_used_before_with_the_same_members_does_not_keep_half_of_the_connections():
    # By the id alone b and c would keep what they have, and a wait for them in vain.
    groups = Groups("abc")
    groups.quorum(2, "abc")
    groups.quorum(1, "a")
    groups.member["a"].missing.names = frozenset()  # they were away for too long
    assert groups.quorum(1, "a") == "connected"
    assert groups.quorum(2, "abc") == "connected"
    assert groups.quorum(2, "abc") == "kept"


def test_a_joiner_declines_with_those_that_were_there_before():
    groups = Groups("abcd")
    groups.quorum(3, "abc")
    assert groups.quorum(1, "d") == "connected"  # all by itself: its cold start is DiLoCo's
    assert groups.quorum(2, "bd") == "declined"
    assert groups.waited_for_by("b") == {"a", "c"}
    assert groups.quorum(2, "bd") == "declined"
    assert groups.waited_for_by("d") == {"a", "c"}
    assert groups.quorum(3, "abcd") == "declined"  # a and c had another id 3: one more round
    assert groups.quorum(3, "abcd") == "connected"


def test_after_a_lighthouse_stood_still_the_first_to_ask_waits_for_those_that_are_alive(caplog):
    # It has heard of nobody for longer than its heartbeat timeout; its ids go on.
    groups = Groups("abc")
    groups.quorum(4, "abc")
    groups.are_alive("a", "b", to="a")  # c has died in the same moment
    assert groups.quorum(5, "a") == "declined"
    assert "Asking for a quorum again: b alive, and missing" in caplog.text
    assert groups.quorum(5, "a") == "declined"  # all members of the last quorum have asked
    assert groups.quorum(6, "ab") == "connected"
    assert not groups.waited_for_by("a") and groups.member["a"].missing.deadline is None


def test_a_joiner_that_asked_before_the_others_declines_a_quorum_that_lacks_some_of_them():
    # The lighthouse's join timeout began with the joiner's request, and was over when a came.
    groups = Groups("abcj")
    groups.quorum(1, "abc")
    groups.are_alive(*"abcj")
    assert groups.quorum(2, "aj") == "declined"
    # b and c have not been in a quorum with j, and would go on without it.
    assert groups.quorum(3, "abc") == "declined"
    assert groups.quorum(4, "abcj") == "connected"


def test_one_that_is_alive_and_stays_away_is_waited_for_once(clock):
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.are_alive(*"abc", to="ab")
    assert groups.quorum(2, "ab") == "declined"  # c was too slow for the lighthouse
    clock.now = MissingMembers.WAIT_FOR_LIVING_S + 1.0
    for letter in "ab":  # as the manager does after that time
        assert groups.member[letter].missing.deadline < clock.now
        groups.member[letter].missing.names = frozenset()
    assert groups.quorum(2, "ab") == "connected"
    groups.are_alive("b", "c", to="b")
    assert groups.quorum(3, "b") == "connected"  # a has died: it is not on the page


def test_members_that_began_to_wait_at_other_times_stop_together(clock):
    # A join timeout that is too short gives quorums of two out of three in turn.
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.are_alive(*"abc")
    assert groups.quorum(2, "ab") == "declined"
    clock.now = MissingMembers.WAIT_FOR_LIVING_S - 1.0
    assert groups.quorum(3, "bc") == "declined"  # c begins to wait
    clock.now = MissingMembers.WAIT_FOR_LIVING_S + 1.0
    assert groups.quorum(4, "ac") == "connected"  # a has waited, c has not


def test_the_time_in_which_the_lighthouse_is_away_is_no_part_of_a_wait(clock):
    groups = Groups("ab")
    groups.quorum(3, "ab")
    groups.are_alive("a", "b")
    missing = groups.member["a"].missing
    for quorum_id in (2, 1):  # it is restarted twice, each time after it was away for long
        clock.now += STRAGGLER_TIMEOUT_S + 30.0
        assert groups.quorum(quorum_id, "a") == "declined"
        missing.wait()
        assert groups.waited_for_by("a") == {"b"}
    clock.now += STRAGGLER_TIMEOUT_S
    missing.wait()
    assert not groups.waited_for_by("a")


# ---- who is blamed, and left out -----------------------------------------------------------------


def test_the_member_at_fault_leaves_after_a_time_and_the_others_count_nothing(clock):
    groups = Groups("abc", min_replica_size=3)  # so that nobody is left out
    groups.quorum(1, "abc")
    limit = Blame.LEAVES_AFTER_S
    for clock.now in [0.0, limit / 2, limit]:
        groups.cannot_reach("c", "a", "b")
        groups.quorum(1, "abc")
        assert groups.blamed("abc") == ["another", "another", "this"]
    groups.quorum(1, "abc")  # it was well once
    assert groups.blamed("abc") == [None] * 3
    for clock.now in [limit, limit + 1.0, 2 * limit + 1.0]:
        groups.cannot_reach("c", "a", "b")
        groups.quorum(1, "abc")
    groups.quorum(1, "abc")  # the sync in that quorum has ended well
    for clock.now in [3 * limit, 4 * limit + 1.0]:
        groups.cannot_reach("c", "a", "b")
        groups.quorum(1, "abc")
    groups.member["c"].own.connection = None
    with pytest.raises(AtFaultError, match="for 31 s syncs have failed .* a, b cannot reach it"):
        groups.quorum(1, "c")


def test_a_failure_after_which_a_member_has_gone_or_come_is_nobody_elses_to_count(caplog):
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.quorum(1, "abc")
    assert groups.blamed("a") == [None]
    assert not caplog.messages
    groups.quorum(2, "ab")
    assert groups.blamed("ab") == ["another"] * 2
    assert caplog.messages == ["No longer in the quorum: replica group c"] * 2


def test_a_member_that_cannot_be_reached_is_left_out_until_it_can(monkeypatch, caplog):
    monkeypatch.setattr(Recheck, "EVERY_S", 0.01)
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.dead = {"c:1"}
    groups.cannot_reach("c", "a", "b")
    assert groups.quorum(1, "abc", left_out="c") == "connected"
    assert [*groups.member["a"].reports] == [*groups.member["b"].reports] == ["a:1", "b:1"]
    assert groups.quorum(1, "abc", left_out="c") == "kept"
    assert [groups.member[letter].is_left_out for letter in "abc"] == [False, False, True]
    assert caplog.text.count("Syncs go on without group c: a, b cannot reach it") == 3  # each once
    groups.dead.clear()
    wait_until(lambda: "c:1" not in groups.member["a"].add_report(HANDLE, 1).partition("unr")[2])
    wait_until(lambda: "c:1" not in groups.member["b"].add_report(HANDLE, 1).partition("unr")[2])
    assert groups.quorum(3, "abc") == "connected"
    assert [*groups.member["c"].reports] == ["a:1", "b:1", "c:1"]
    assert groups.quorum(3, "abc") == "kept"


def test_a_member_is_tried_again_after_an_error_that_nobody_has_foreseen(monkeypatch, caplog):
    answers = iter([RuntimeError("can't start new thread"), ("c:1",), ()])

    def find_unreachable(handles):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Recheck, "EVERY_S", 0.01)
    monkeypatch.setattr("composer_replication.util.fence._logged", set())
    recheck = Recheck({"c:1": {}}, find_unreachable)
    wait_until(lambda: not recheck.names)
    assert "RuntimeError: can't start new thread" in caplog.text


def test_nobody_waits_for_a_member_that_is_left_out_and_asks_late():
    groups = Groups("abc")
    groups.quorum(1, "abc")
    groups.dead = {"a:1"}
    groups.cannot_reach("a", "c")
    groups.are_alive(*"abc")
    assert groups.quorum(1, "abc", left_out="a") == "connected"
    assert groups.quorum(2, "bc") == "connected"  # and not declined


# ---- strangers -----------------------------------------------------------------------------------


def use(member, *others, step=4, quorum_id=3):
    """Have a member use a quorum with others, by name and handle."""
    handles = {member.name: member.add_report(HANDLE, step), **dict(others)}
    return member.use(quorum_of(handles, member.name, quorum_id), do_ranks_agree=None)


def signed(**changes):
    """A handle of a member that knows the token and writes nonsense."""
    content = {**json.loads(handle_of("b")), **changes}
    del content["proof"]
    return json.dumps(content | {"proof": proof("secret", "report", "b:1", content)})


NONSENSE = [
    "[" * 100_000,
    '["last"]',
    HANDLE,
    '{"store": "host:1", "proof": "\u00fc"}',
    signed(store=None),
    signed(previous=[9, [["a"]]]),
    signed(left_out=[3]),
    signed(connection=["1", 2, 3]),
    signed(step="1"),
    signed(settings=["sync_every"]),
]


@pytest.mark.parametrize("handle", NONSENSE, ids=range(len(NONSENSE)))
def test_a_member_whose_handle_cannot_be_understood_is_left_out(handle, caplog):
    member = member_of("a")
    quorum = use(member, ("b:1", handle))
    assert quorum.replica_ids == ["a:1"] and quorum.replica_world_size == 1
    assert quorum.max_step == 4 and not quorum.heal  # whatever step the other one claims
    assert [*member.reports] == ["a:1"] and not member.missing.names and not member.own.connection
    assert "Left 'b:1' out of the quorum" in caplog.text


@pytest.mark.parametrize(
    ("name", "handle"),
    [
        ("b:1", handle_of("b", token="another")),
        ("c:1", handle_of("b")),  # another member's handle, used by a stranger
    ],
)
def test_who_does_not_prove_the_token_is_left_out_and_named_once(name, handle, caplog):
    member = member_of("a")
    for _ in range(2):
        quorum = use(member, (name, handle), ("d:1", handle_of("d", MemberReport(step=4))))
        assert quorum.replica_ids == ["a:1", "d:1"] and quorum.replica_rank == 0
    assert caplog.text.count("does not prove that it knows this run's token") == 1


def test_nobody_waits_for_a_stranger_that_does_not_come_again():
    member, other = member_of("a"), ("b:1", handle_of("b"))
    member.missing.read_alive = lambda: frozenset({"a:1", "b:1", "x:1"})
    use(member, ("x:1", "a stranger"), other)
    assert use(member, other, quorum_id=10).replica_ids == ["a:1", "b:1"]  # and not declined


def test_while_a_token_is_replaced_both_are_accepted_and_a_handle_with_more_in_it():
    others = [("b:1", handle_of("b", token="new")), ("c:1", handle_of("c", token="old"))]
    member = member_of("a", tokens=["new", "old", "secret"])
    assert use(member, *others).replica_ids == ["a:1", "b:1", "c:1"]
    assert use(member, ("b:1", signed(more=1)), quorum_id=4).replica_ids == ["a:1", "b:1"]


def test_somebody_who_asks_in_this_groups_name_gives_no_quorum():
    with pytest.raises(QuorumFailed, match="in the name of this group, 'a:1'"):
        use(member_of("a"), ("a:1", handle_of("b")))


# ---- settings ------------------------------------------------------------------------------------


def test_tensors_are_reported_while_a_group_joins():
    member = member_of("a")
    member.own.settings = {"model": "m", "tensors": {"weight": "(2,)"}}
    assert "(2,)" in member.add_report(HANDLE, 1)
    use(member)
    assert "(2,)" not in member.add_report(HANDLE, 1)
    use(member, ("b:1", handle_of("b", MemberReport(settings=member.own.settings))), quorum_id=4)


def test_those_that_stay_decline_until_the_one_with_other_settings_has_left(caplog):
    member = member_of("a")
    member.own.settings = {"ranks": 1}
    for _ in range(2):
        with pytest.raises(QuorumDeclined):
            use(member, ("b:1", handle_of("b", MemberReport(settings={"ranks": 2}))))
    assert caplog.text.count("replica group b, make them equal: ranks: 1 here, 2 there") == 1
    assert use(member, quorum_id=4).replica_ids == ["a:1"]


def test_a_group_that_has_to_leave_does_so_on_all_its_ranks():
    store = HashStore()
    ranks = [member_of("b", rank=rank, num_ranks=2, store=store) for rank in range(2)]
    for rank in ranks:
        rank.own.settings = {"ranks": 2}
    own = ranks[0].add_report(HANDLE, 0)
    peer = handle_of("a", MemberReport(settings={"ranks": 1}))
    # Of a group without a rank 1 torchft tells rank 1 nothing.
    for rank, handle in zip(ranks, (peer, ""), strict=True):
        quorum = quorum_of({"a:1": handle, "b:1": own}, "b:1")
        with pytest.raises(SettingsMismatch, match="of replica group a, .* ranks: 2 here, 1 there"):
            rank.use(quorum, do_ranks_agree=lambda is_used: False)


def test_a_group_that_saves_to_another_s_remote_folder_leaves_and_the_other_waits_for_that():
    ours = member_of("a"), member_of("b")
    for member in ours:
        member.own.saves_to = ("s3://bucket/out",)
    handles = {member.name: member.add_report(HANDLE, 0) for member in ours}
    a, b = (lambda m=m: m.use(quorum_of(handles, m.name), lambda is_used: is_used) for m in ours)
    with pytest.raises(QuorumDeclined):
        a()
    with pytest.raises(SettingsMismatch, match="groups a and b both save to s3://bucket/out"):
        b()


# ---- two groups with one replica id --------------------------------------------------------------

BEFORE = PreviousQuorum(2, ("a:1", "a:2", "b:1"))


def other(name, **report):
    return name, write_handle(HANDLE, MemberReport(**report), name, "secret")


@pytest.mark.parametrize(
    ("was_there", "others", "used"),
    [
        (True, [other("a:2", board="far:7"), other("b:1", previous=BEFORE)], "a:1 b:1"),
        (False, [other("a:2", board="far:7")], "a:1"),  # both begin: the name that sorts first
        (True, [other("b:1", board="far:7"), other("b:2", previous=BEFORE)], "a:1 b:2"),
    ],
)
def test_a_second_holder_of_a_replica_id_is_left_out_by_all_others(caplog, was_there, others, used):
    member = member_of("a")
    if was_there:
        use(member, quorum_id=1)
    with caplog.at_level(logging.WARNING):
        assert use(member, *others).replica_ids == used.split()
    assert f"Left a second replica group '{others[0][0][0]}', on far, out of" in caplog.text


def test_a_second_holder_leaves_by_name_if_the_first_one_is_alive(start_server):
    with pytest.raises(DuplicateIdError) as error:
        use(member_of("a"), other("a:2", previous=BEFORE, board=start_server().address))
    assert str(error.value).startswith(
        "replica_id='a' is taken: a living replica group on 127.0.0.1 has it. Give each group"
    )
    assert len(str(error.value)) < 280


def test_a_group_that_was_started_again_waits_for_the_end_of_its_dead_predecessor():
    # It was killed while it asked for a quorum, so the lighthouse has its request.
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    member = member_of("a")
    for _ in range(2):
        with pytest.raises(QuorumDeclined):
            use(member, other("a:2", previous=BEFORE, board=address))
    assert use(member).replica_ids == ["a:1"]


# ---- how long a group waits for the missing -----------------------------------------------------


class Situation:
    """A group that waits for ``b`` and ``c``; ``heard_from``: since when the lighthouse hears of
    each member, in seconds."""

    def __init__(self, clock, **heard_from):
        self.clock, self.heard_from, self.died = clock, heard_from, {}
        self.missing = MissingMembers(self.read_alive)
        self.missing.add_all(["b:1", "c:1"])
        self.missing.update([], ["a:1"])

    def read_alive(self):
        return frozenset(
            f"{letter}:1"
            for letter, at in self.heard_from.items()
            if at <= self.clock.now < self.died.get(letter, math.inf)
        )

    def wait(self):
        """The members still waited for, and the seconds that it took."""
        before = self.clock.now
        self.missing.wait()
        return set(self.missing.names), pytest.approx(self.clock.now - before, abs=0.11)


BOTH = {"b:1", "c:1"}
HEARTBEAT_S, MINUTE_S = MissingMembers.HEARTBEAT_WITHIN_S, STRAGGLER_TIMEOUT_S
NOT_HEARD = "Going on without those that the lighthouse has not heard of: "
NOT_ASKED = "Going on without those that the lighthouse was not asked for a quorum by: "


@pytest.mark.parametrize(
    ("heard_from", "now", "left", "seconds", "said"),
    [
        ({"a": 0.0, "b": 1.0, "c": 4.0}, 0.0, BOTH, 4.0, []),
        ({"a": 0.0, "b": 1.0, "c": 6.0}, 0.0, {"b:1"}, HEARTBEAT_S, [f"{NOT_HEARD}c"]),
        # A lighthouse that is away lets nobody die, but for one that cannot be read for a minute: a
        # proxy, or a firewall that lets gRPC through only.
        ({}, 0.0, BOTH, HEARTBEAT_S, []),
        ({}, MINUTE_S, set(), HEARTBEAT_S, [f"{NOT_ASKED}b, c"]),
        # They are alive and ask for no quorum: as any straggler.
        ({"a": 0.0, "b": 0.0, "c": 0.0}, MINUTE_S - 1.0, BOTH, 0.1, []),
        ({"a": 0.0, "b": 0.0, "c": 0.0}, MINUTE_S, set(), 0.1, [f"{NOT_ASKED}b, c"]),
    ],
)
def test_who_is_still_waited_for_and_after_how_long(
    clock, caplog, heard_from, now, left, seconds, said
):
    situation = Situation(clock, **heard_from)
    clock.now = now
    with caplog.at_level(logging.WARNING):
        assert situation.wait() == (left, seconds)
    assert caplog.messages == said


@pytest.mark.parametrize("restarted", [False, True])
def test_a_member_whose_heartbeats_have_stopped_is_given_up_sooner_but_not_after_a_restart(
    clock, caplog, restarted
):
    situation = Situation(clock, a=0.0, b=0.0, c=1.0)
    situation.wait()
    if restarted:
        situation.missing.add_all(BOTH)
    situation.died = {"b": clock.now}
    with caplog.at_level(logging.WARNING):
        limit_s = HEARTBEAT_S if restarted else MissingMembers.GONE_WITHIN_S
        assert situation.wait() == ({"c:1"}, limit_s)
    assert caplog.messages == [f"{NOT_HEARD}b"]


def test_an_earlier_deadline_ends_the_wait(clock):
    situation = Situation(clock, a=0.0, b=0.0, c=0.0)
    situation.missing.deadline = 5.0
    assert situation.wait() == (BOTH, 0.1)
    clock.now = 5.0
    assert situation.wait() == (set(), 0.1)
