"""What follows from the reports in a quorum, by pure functions of the reports.

Run: pytest tests/replica/test_quorum.py
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from composer_replication.replica.blame import at_fault, members_to_leave_out
from composer_replication.replica.lighthouse import LighthouseStatus, Member
from composer_replication.replica.quorum import (
    MemberReport,
    PreviousQuorum,
    check_ranks,
    has_lighthouse_restarted,
    members_before,
    other_settings,
    restrict_quorum,
    second_holders,
    shared_folders,
)
from composer_replication.settings import SettingsMismatch


def named(reports):
    """MemberReports by the lighthouse's names of the members, from those by one letter each."""
    return {f"{letter}:1": report for letter, report in reports.items()}


def names(letters):
    return frozenset(f"{letter}:1" for letter in letters)


def unreachable(*letters, step=1):
    return MemberReport(step=step, unreachable=tuple(f"{letter}:1" for letter in letters))


# ---- who leaves ----------------------------------------------------------------------------------

RUN = {"ranks": 1, "min_replica_size": 1, "sync_every": 10, "model": "m"}
BEFORE = PreviousQuorum(1, ("a:1",))


@pytest.mark.parametrize("step", [0, 4, 5, 6])
@pytest.mark.parametrize("key", RUN)
def test_other_settings_are_refused_by_name_before_anything_is_sent(key, step):
    # A newcomer, with the state of the groups in training, an older or a newer one.
    other = RUN | {key: "another"}
    reports = {
        "b:1": MemberReport(step=step, settings=other),
        "a:1": MemberReport(step=5, settings=RUN, previous=BEFORE),
    }
    difference = f"make them equal: {key}: 'another' here, {RUN[key]!r} there"
    with pytest.raises(SettingsMismatch, match=f"^this .* of replica group a, {difference}$"):
        other_settings(reports, "b:1")
    [(name, line)] = other_settings(reports, "a:1").items()
    assert name == "b:1" and line.startswith("Not connecting to a replica group, which has to")
    assert f"of replica group b, make them equal: {key}: {RUN[key]!r} here, 'another'" in line


def test_of_new_groups_the_first_one_with_the_newest_state_stays():
    reports = {
        n: MemberReport(settings={"ranks": r}) for n, r in {"a:1": 1, "b:1": 2, "c:1": 1}.items()
    }
    assert other_settings(reports, "a:1").keys() == other_settings(reports, "c:1").keys() == {"b:1"}
    reports["b:1"] = replace(reports["b:1"], step=3)
    assert other_settings(reports, "b:1").keys() == {"a:1", "c:1"}


def test_equal_groups_fit_and_of_other_models_the_first_tensor_is_named_if_both_say_theirs():
    tensors = {"0.weight": "(2,)", "1.weight": "(3,)"}
    joiner = MemberReport(settings=RUN | {"tensors": tensors})
    in_training = MemberReport(settings=RUN, previous=BEFORE)
    assert not other_settings({"a:1": in_training, "b:1": joiner}, "b:1")
    other = RUN | {"model": "n", "tensors": tensors | {"1.weight": "(4,)"}}
    reports = {"a:1": joiner, "b:1": MemberReport(settings=other)}
    with pytest.raises(SettingsMismatch, match=re.escape("equal: 1.weight: '(4,)' here, '(3,)'")):
        other_settings(reports, "b:1")
    reports["a:1"] = in_training
    with pytest.raises(SettingsMismatch, match="equal: model: 'n' here, 'm' there"):
        other_settings(reports, "b:1")


def test_a_joiner_of_other_ranks_is_refused_before_the_others_see_it():
    peers = (Member("a:1", 5, "http://a", 1), Member("gone:1", 5, "http://g", 4))
    status = LighthouseStatus(peers, alive=frozenset({"a:1"}))
    check_ranks(status, "b", 1)
    check_ranks(status, "a", 2)  # itself, in an earlier life
    with pytest.raises(SettingsMismatch, match=r"replica group a, .*: ranks: 2 here, 1 there"):
        check_ranks(status, "b", 2)
    stranger = Member("s:1", 9, "http://s", 2)
    check_ranks(replace(status, members=(*peers, stranger), alive={"a:1", "s:1"}), "b", 1)


def test_the_first_holder_of_a_replica_id_is_the_one_that_was_there_before():
    new, old = MemberReport(), MemberReport(previous=BEFORE)
    assert not second_holders({"a:1": new, "b:1": new})
    assert second_holders({"a:2": new, "a:1": new, "b:1": new}) == {"a:2": "a:1"}
    assert second_holders({"a:1": new, "a:2": old}) == {"a:1": "a:2"}


def test_of_groups_that_save_to_one_remote_folder_the_one_that_was_there_before_stays():
    new, old = (
        MemberReport(saves_to=("s3://b/f", "s3://b/own")),
        MemberReport(saves_to=("s3://b/f",)),
    )
    earlier = replace(old, previous=BEFORE)
    reports = {"a:1": new, "b:1": earlier, "b:2": old, "c:1": MemberReport(), "d:1": MemberReport()}
    [(name, problem)] = shared_folders(reports).items()
    assert name == "a:1"
    assert problem.startswith("replica groups b and a both save to s3://b/f, and would overwrite")
    assert shared_folders({"a:1": new, "b:1": old}).keys() == {"b:1"}
    slash = MemberReport(saves_to=("s3://b/f/",))
    assert shared_folders({"a:1": new, "b:1": slash}).keys() == {"b:1"}
    assert not shared_folders(
        {"a:1": new, "a:2": earlier, "b:1": MemberReport(saves_to=("s3://b/g",))}
    )


# ---- who is waited for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("previous", "current", "has_restarted"),
    [
        ([], (1, "ab"), False),
        ([(1, "ab"), (1, "ab")], (2, "abc"), False),
        ([(2, "ab")], (1, "ab"), True),  # a lighthouse's ids grow
        ([(2, "ab")], (2, "abc"), True),  # and one id has the same members
        ([(1, "abc"), (2, "bc")], (4, "abc"), False),  # a was slow
        ([(5, "ab"), (6, "ac"), (4, "acd")], (7, "acd"), False),  # b died, and c is back
        ([(1, "abc"), (2, "de")], (3, "abcde"), True),  # joiners have raised the ids
        ([(1, "abc"), (1, "de")], (2, "abcde"), True),
    ],
)
def test_ids_that_no_single_lighthouse_can_have_given(previous, current, has_restarted):
    known, now = [PreviousQuorum(i, tuple(m)) for i, m in previous], PreviousQuorum(*current)
    assert has_lighthouse_restarted(known, now._replace(members=tuple(now.members))) == (
        has_restarted
    )


def test_the_members_before_are_those_of_all_memories_but_for_those_left_out():
    with_stranger = PreviousQuorum(3, ("a:1", "b:1", "x:1"))
    reports = {
        "a:1": MemberReport(previous=with_stranger, left_out=("x:1",)),
        "j:1": MemberReport(),
    }
    assert members_before(reports) == names("ab")


# ---- who is blamed, and left out -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("reports", "culprit"),
    [
        ({"a": MemberReport(), "b": MemberReport()}, None),
        ({"a": unreachable("c"), "b": unreachable("c"), "c": unreachable("c")}, "c:1"),
        ({"a": unreachable("c"), "b": unreachable("c"), "c": unreachable()}, "c:1"),
        ({"a": unreachable("b", "c"), "b": unreachable(), "c": unreachable()}, "a:1"),
        ({"a": unreachable(), "b": unreachable("c"), "c": unreachable("b")}, "c:1"),
        ({"a": unreachable(), "b": unreachable(), "c": unreachable("b")}, "b:1"),
        ({"a": unreachable("b"), "b": unreachable("a")}, "b:1"),
        ({"a": unreachable("b", step=0), "b": unreachable("a")}, "a:1"),
        ({"a": MemberReport(has_failed=True), "b": unreachable("c"), "c": unreachable("b")}, "a:1"),
        ({"a": unreachable("d"), "b": unreachable()}, None),  # d has gone meanwhile
    ],
)
def test_a_failed_sync_is_blamed_on_one_member_by_all(reports, culprit):
    assert at_fault(named(reports)) == culprit
    assert at_fault(dict(reversed(named(reports).items()))) == culprit


TWO_OUT = {
    "a": unreachable("c", "d"),
    "b": unreachable("c", "d"),
    "c": MemberReport(1),
    "d": MemberReport(1),
}


@pytest.mark.parametrize(
    ("min_replica_size", "reports", "left_out"),
    [
        (1, {"a": MemberReport(), "b": MemberReport()}, ""),
        (1, {"a": unreachable("b"), "b": unreachable("a")}, "b"),
        (2, {"a": unreachable("b"), "b": unreachable("a")}, ""),
        (1, TWO_OUT, "cd"),
        (3, TWO_OUT, ""),
        (1, {"a": unreachable("c"), "b": MemberReport(has_failed=True), "c": MemberReport(1)}, ""),
        (1, {"a": unreachable("b"), "b": MemberReport(0)}, "b"),  # a joiner that is not reached
        # The only one with the newest parameters stays: without it outer steps would be lost.
        (
            1,
            {"a": unreachable("c", step=0), "b": unreachable("c", step=0), "c": MemberReport(1)},
            "ab",
        ),
    ],
)
def test_who_is_left_out(min_replica_size, reports, left_out):
    assert members_to_leave_out(named(reports), min_replica_size) == names(left_out)


# ---- what is left of the quorum ------------------------------------------------------------------


def restricted(own, group_rank=0, **steps):
    """What a member has of a quorum from which the stranger x has been taken away."""
    members = ["a:1", "x:1", *(name for name in named(steps) if name != "a:1")]
    quorum = SimpleNamespace(
        quorum_id=3,
        replica_rank=members.index(f"{own}:1"),
        replica_ids=members,
        reconfigure_handles=[f"handle of {name}" for name in members],
    )
    reports = {n: MemberReport(step=s, manager=f"http://{n[0]}") for n, s in named(steps).items()}
    return restrict_quorum(quorum, reports, group_rank)


def test_joiners_heal_from_the_members_that_stay_in_turns():
    joiner = restricted("a", a=2, b=7, c=2, d=7)
    assert joiner.replica_ids == ["a:1", "b:1", "c:1", "d:1"] and joiner.max_step == 7
    assert joiner.reconfigure_handles[1] == "handle of b:1" and joiner.replica_world_size == 4
    assert joiner.heal and joiner.recover_src_manager_address == "http://b"
    assert joiner.recover_src_replica_rank == 1 and joiner.recover_dst_replica_ranks == []
    donor = restricted("a", group_rank=1, a=7, b=7, c=2, d=7)
    assert not donor.heal
    assert donor.recover_dst_replica_ranks == []  # c's turn is the second of three, which is b
    assert restricted("b", group_rank=1, a=7, b=7, c=2, d=7).recover_dst_replica_ranks == [2]
