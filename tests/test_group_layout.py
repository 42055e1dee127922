"""A group of other ranks or shards than its peers' leaves before anything is connected.

Run: pytest tests/test_group_layout.py. Faked is the lighthouse; the store is a dict.
"""

import re

import pytest

from composer_replication.diloco.settings import SettingsMismatch
from composer_replication.group_layout import GroupLayout, check_ranks, parse_layout
from composer_replication.lighthouse import LighthouseStatus, Member


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


def told(layout, last=None):
    return {"layout": layout, "last": last}


def test_of_two_new_groups_the_second_leaves_on_all_its_ranks_and_the_first_does_not_connect():
    names = ["a:1", "b:1"]
    sent = [told([1, 1]), told([2, 1])]
    first = GroupLayout(1)
    assert not first.fits(names, sent)
    first.check()  # it stays, and asks for another quorum
    store = Store()
    ranks = [GroupLayout(2, rank, store) for rank in range(2)]
    # Of a group without a rank 1 torchft tells rank 1 nothing.
    votes = [ranks[0].fits(names, sent), ranks[1].fits(names, [told(None), told([2, 1])])]
    assert votes == [False, True]
    for rank in ranks:
        with pytest.raises(SettingsMismatch) as caught:
            rank.check()
        assert str(caught.value) == (
            "this replica group has 2 ranks with the whole model on each, and replica group 'a' of "
            "this run has 1 rank with the whole model on each: start every group with the same "
            "number of ranks and the same kind of sharding"
        )


def test_a_newcomer_leaves_and_not_those_in_training_whatever_the_order_of_names():
    names = ["a:1", "b:1", "c:1"]
    sent = [told([2, 1]), told([2, 2], [1, ["b:1", "c:1"]]), told([2, 2], [1, ["b:1", "c:1"]])]
    newcomer, in_training = GroupLayout(2, 0, Store()), GroupLayout(2)
    in_training.num_shards = 2
    assert not newcomer.fits(names, sent) and not in_training.fits(names, sent)
    in_training.check()
    whole, shards = "the whole model on each", "the model in 2 shards"
    with pytest.raises(SettingsMismatch, match=f"has 2 ranks with {whole}, .*'b' .* {shards}"):
        newcomer.check()


def test_equal_groups_fit_and_one_that_tells_nothing_is_not_judged():
    layout = GroupLayout(2)
    assert layout.fits(["a:1", "b:1"], [told([2, 1]), told(None)])
    assert layout.fits(["a:1"], [told(None)])
    layout.check()


@pytest.mark.parametrize("sent", [None, 2, [2], [2, 1, 1], ["2", 1], [0, 1], [True, 1], {"a": 1}])
def test_what_is_no_layout_is_ignored(sent):
    assert parse_layout(sent) is None


def test_a_joiner_is_refused_before_the_others_see_it():
    peers = (Member("a:1", 5, "http://a", 1), Member("gone:1", 5, "http://g", 4))
    status = LighthouseStatus(peers, alive=frozenset({"a:1"}))
    check_ranks(status, "b", 1)
    check_ranks(status, "a", 2)  # itself, in an earlier life
    line = "this replica group has 2 ranks, and replica group 'a' of this run has 1 rank: start"
    with pytest.raises(SettingsMismatch, match=re.escape(line)):
        check_ranks(status, "b", 2)
