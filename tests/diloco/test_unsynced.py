"""What a fragment has not synchronised yet, sync by sync."""

import pytest

from composer_replication.diloco.unsynced import Unsynced


def sent(weight_by="steps", samples=(8, 8)):
    """Two inner steps that a sync has packed."""
    unsynced = Unsynced(weight_by)
    for number in samples:
        unsynced.count(number)
    unsynced.packed = unsynced.pack(position=5, local=None, frozen=())
    return unsynced


@pytest.mark.parametrize(
    ("weight_by", "contribution"), [("uniform", 1.0), ("steps", 2.0), ("samples", 16.0)]
)
def test_a_group_counts_as_much_as_it_has_trained(weight_by, contribution):
    assert sent(weight_by).contribution() == contribution
    assert sent(weight_by, samples=()).contribution() == 0.0


def test_samples_that_nobody_counted_are_an_error():
    with pytest.raises(ValueError, match=r"no tokens were counted: call count_tokens\(n\)"):
        sent("tokens", samples=(0, 0)).contribution()


@pytest.mark.parametrize(("keeps_later", "left"), [(True, (1, 3)), (False, (0, 0))])
def test_steps_taken_while_a_sync_is_in_flight_wait_for_the_next_one(keeps_later, left):
    unsynced = sent()
    unsynced.count(3)
    unsynced.discard_synced(keeps_later=keeps_later, is_joining=False)
    assert (unsynced.inner_steps, unsynced.samples) == left
    assert unsynced.has_more == keeps_later


def test_what_came_after_a_reset_is_not_of_the_sync_in_flight():
    unsynced = sent()
    unsynced.forget()
    assert not unsynced.has_more
    unsynced.count(3)
    unsynced.discard_synced(keeps_later=True, is_joining=False)
    assert (unsynced.inner_steps, unsynced.samples) == (1, 3)


def test_an_average_is_sent_once_and_counts_as_one_group():
    unsynced = Unsynced("steps")
    unsynced.replaces_global = True
    assert unsynced.has_more
    unsynced.packed = unsynced.pack(position=0, local=None, frozen=())
    assert unsynced.contribution() == 1.0
    unsynced.discard_synced(keeps_later=True, is_joining=False)
    assert not unsynced.has_more


def test_an_average_that_came_while_a_sync_was_in_flight_is_still_to_be_sent():
    unsynced = sent()
    unsynced.replaces_global = True
    unsynced.discard_synced(keeps_later=True, is_joining=False)
    assert unsynced.has_more
