"""A group of other ranks or shards than its peers' leaves before anything is connected.

Run: pytest tests/replica/test_group_layout.py. Faked is the lighthouse; the store is torch's, or
a dict.
"""

import re
from dataclasses import replace

import pytest

from composer_replication.replica.group_layout import (
    GroupLayout,
    check_ranks,
)
from composer_replication.replica.lighthouse import LighthouseStatus, Member
from composer_replication.replica.quorum_reports import Report
from composer_replication.settings import SettingsMismatch


class Store:
    """A TCPStore that all ranks of a group share."""

    def __init__(self):
        self._kept = {}

    def set(self, key, value):
        self._kept[key] = value.encode()

    def get(self, key):
        return self._kept[key]

    def check(self, keys):
        return all(key in self._kept for key in keys)


def quorum(*, after=(), **layouts):
    """Reports by member: ranks and shards of each, and ``after`` which quorum some come."""
    return {
        f"{name}:1": Report(
            num_ranks=ranks, num_shards=shards, previous=[1, list(after)] if name in after else None
        )
        for name, (ranks, shards) in layouts.items()
    }


def test_of_two_new_groups_the_second_leaves_on_all_its_ranks_and_the_first_does_not_connect(
    caplog,
):
    reports = quorum(a=(1, 1), b=(2, 1))
    first = GroupLayout(1)
    assert not first.fits(reports)
    first.check()  # it stays, and asks for another quorum
    assert not first.fits(reports)
    assert [record.getMessage() for record in caplog.records] == [
        "Not connecting to replica group b, which has to leave: it has 2 ranks with the whole "
        "model on each, and this group has 1 rank with the whole model on each"
    ]
    store = Store()
    ranks = [GroupLayout(2, rank, store) for rank in range(2)]
    # Of a group without a rank 1 torchft tells rank 1 nothing.
    assert [ranks[0].fits(reports), ranks[1].fits(quorum(b=(2, 1)))] == [False, True]
    for rank in ranks:
        with pytest.raises(SettingsMismatch) as caught:
            rank.check()
        assert str(caught.value) == (
            "this replica group has 2 ranks with the whole model on each, and replica group a of "
            "this run has 1 rank with the whole model on each: start every group with the same "
            "number of ranks, the same kind of sharding, settings and model, and the same version "
            "of composer-replication"
        )


def test_a_newcomer_leaves_and_not_those_in_training_whatever_the_order_of_names():
    reports = quorum(a=(2, 1), b=(2, 2), c=(2, 2), after=("b", "c"))
    newcomer, in_training = GroupLayout(2, 0, Store()), GroupLayout(2)
    in_training.num_shards = 2
    assert not newcomer.fits(reports) and not in_training.fits(reports)
    in_training.check()
    whole, shards = "the whole model on each", "the model in 2 shards"
    with pytest.raises(SettingsMismatch, match=f"has 2 ranks with {whole}, .* b .* {shards}: "):
        newcomer.check()


def test_equal_groups_fit():
    layout = GroupLayout(2)
    assert layout.fits(quorum(a=(2, 1), b=(2, 1)))
    layout.check()


def settings(**members):
    """Reports by member: row, settings and step of each; those with a step were in a quorum."""
    return {
        f"{name}:1": Report(row=row, settings=own, step=step, previous=[1, []] if step else None)
        for name, (row, own, step) in members.items()
    }


RUN = (24, ("min_replica_size=1", "sync_every=10"))
ONE_RANK = "1 rank with the whole model on each"


@pytest.mark.parametrize(("own", "step", "ours", "theirs"), [
    (RUN, 5, "", ""),
    ((24, ("min_replica_size=1", "sync_every=20")), 5, "sync_every=20", "sync_every=10"),
    ((24, ("min_replica_size=2", "sync_every=10")), 5, "min_replica_size=2", "min_replica_size=1"),
    # It takes over the state, which says what differs. Then it has the others' step.
    ((24, ("min_replica_size=1", "sync_every=20")), 0, "", ""),
    # Another build, whose table no heal makes equal.
    ((25, RUN[1]), 0, "25 bytes a table row", "24 bytes a table row"),
    ((25, RUN[1]), 5, "25 bytes a table row", "24 bytes a table row"),
])  # fmt: skip
def test_other_settings_are_refused_before_anything_is_sent(own, step, ours, theirs, caplog):
    layout, in_training = GroupLayout(1), GroupLayout(1)
    layout.row, layout.settings = own
    in_training.row, in_training.settings = RUN
    reports = settings(a=(*RUN, 5), b=(*own, step))
    assert layout.fits(reports, step) == in_training.fits(reports, 5) == (not ours)
    in_training.check()
    if ours:
        line = f"this replica group has {ONE_RANK}, {ours}, and replica group a of this run has "
        with pytest.raises(SettingsMismatch, match=f"^{line}{ONE_RANK}, {theirs}: start every"):
            layout.check()
        assert f"it has {ONE_RANK}, {ours}, and this group has {ONE_RANK}, {theirs}" in caplog.text


def test_a_joiner_is_refused_before_the_others_see_it():
    peers = (Member("a:1", 5, "http://a", 1), Member("gone:1", 5, "http://g", 4))
    status = LighthouseStatus(peers, alive=frozenset({"a:1"}))
    check_ranks(status, "b", 1)
    check_ranks(status, "a", 2)  # itself, in an earlier life
    line = "this replica group has 2 ranks, and replica group a of this run has 1 rank: start"
    with pytest.raises(SettingsMismatch, match=re.escape(line)):
        check_ranks(status, "b", 2)
    stranger = replace(
        status, members=(*peers, Member("s:1", 9, "http://s", 2)), alive={"a:1", "s:1"}
    )
    check_ranks(stranger, "b", 1)
