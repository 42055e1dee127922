"""Work units: each sample of an epoch is in the model once, whoever dies, restarts or rewinds.

Run: pytest tests/coordinator/work_units/test_work_units.py. In one process, a file of SQLite in a
temporary folder. The rules one by one; all calls in any order are in
test_work_units_in_any_order.py, which holds what is leased and counted against the truth.
"""

import threading

import pytest
from coordinator.small_units import (
    LENGTH,
    SEED,
    UNIT_SIZE,
    UNKNOWN,
    counts,
    lease_all,
    open_ones,
    open_stream,
    samples,
    size_of,
    unit_order,
)

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.work_units.leases import Lease
from composer_replication.coordinator.work_units.tables import (
    MAX_UNITS,
    DatasetMismatch,
    UnknownStream,
)
from composer_replication.coordinator.work_units.work_units import WorkUnits


def in_part(units):
    return units.dataset("c4").trained_in_part


# Datasets and streams.


def test_a_dataset_may_be_created_again_but_not_otherwise(units):
    units.create_dataset("c4", LENGTH, SEED, UNIT_SIZE)
    with pytest.raises(DatasetMismatch, match="'c4' exists with length 23, not 24 and seed 7, "):
        units.create_dataset("c4", LENGTH + 1, SEED + 1, UNIT_SIZE)


def test_a_dataset_of_more_units_than_fit_is_refused_with_a_size_that_does(units):
    with pytest.raises(ValueError, match="units of 2[0-9,]+ samples, .*: use a unit_size of 121 "):
        units.create_dataset("huge", 120 * MAX_UNITS + 1, 0, 64)
    units.create_dataset("huge", 120 * MAX_UNITS + 1, 0, 121)


def test_an_unknown_dataset_is_refused(units):
    for call in (units.dataset, lambda d: units.open_stream("a", d, "0", "one")):
        with pytest.raises(ValueError, match="There is no dataset 'pile': create it first"):
            call("pile")


def test_datasets_are_listed_with_what_was_begun(units, a):
    units.create_dataset("pile", 3, 0, 1)
    units.lease(a, 0, 2)
    c4, pile = units.datasets()
    assert (c4.dataset_id, [epoch.epoch for epoch in c4.epochs]) == ("c4", [2])
    assert (pile.dataset_id, pile.length, pile.unit_size, pile.epochs) == ("pile", 3, 1, [])


def test_a_name_is_of_one_stream_which_is_of_one_group(units, a, b):
    assert open_stream(units, "a") == a != b
    units.create_dataset("pile", 3, 0, 1)
    for dataset_id, replica_id in (("c4", "another"), ("pile", "replica of a")):
        with pytest.raises(
            ValueError, match="Stream 'a' belongs to replica group 'replica of a' or an"
        ):
            units.open_stream("a", dataset_id, replica_id, "session of a")
    expected = [(a, "replica of a", "session of a"), (b, "replica of b", "session of b")]
    assert open_ones(units) == expected
    units.close(a)
    assert open_stream(units, "a") == a, "it is told, and is still closed"
    assert open_ones(units) == expected[1:]


def test_streams_of_two_state_folders_have_other_keys(tmp_path):
    keys = set()
    for folder in range(3):
        database = Database(tmp_path / f"{folder}.db")
        units = WorkUnits(database)
        units.create_dataset("c4", LENGTH, SEED, UNIT_SIZE)
        keys |= {open_stream(units, name) for name in "abcd"}
        database.close()
    assert len(keys) == 12 and 0 < min(keys) and max(keys) < 2**31


def test_an_unknown_stream_is_told_from_a_closed_one(units):
    calls = (
        lambda: units.close(UNKNOWN),
        lambda: units.reopen(UNKNOWN, 0, "one"),
        lambda: units.rewind({UNKNOWN: (1, 1)}),
    )
    for call in calls:
        with pytest.raises(UnknownStream, match=f"all leases of stream {UNKNOWN}: .* state folder"):
            call()


# Leases.


def test_leases_follow_the_order_of_the_epoch_and_number_the_stream(units, a):
    leases = lease_all(units, a, epoch=3)
    assert [lease.unit for lease in leases] == unit_order(3)
    stream_start = 0
    for number, lease in enumerate(leases):
        assert lease == Lease(number, 3, lease.unit, 0, size_of(lease.unit), stream_start)
        stream_start += size_of(lease.unit)


def test_an_epoch_that_is_not_asked_for_is_not_begun(units, a):
    units.lease(a, 0, epoch=5)
    assert [p.epoch for p in units.dataset("c4").epochs] == [5]
    assert units.lease(a, 1, epoch=0).epoch == 0


def test_a_lease_is_the_same_whenever_it_is_asked_for(units, a, database, path):
    first = units.lease(a, 0, 0)
    units.lease(a, 1, 0)
    units.commit({a: (3, 3)})
    assert units.lease(a, 0, 0) == first
    assert units.lease(a, 0, epoch=1) == first, "it keeps the epoch it was given with"
    database.close()
    again = Database(path)
    assert WorkUnits(again).lease(a, 0, 0) == first
    again.close()


def test_what_was_lost_with_a_state_folder_gets_no_further_lease(units, a):
    """A stream, or leases of it: the group opens another one, as if it were closed."""
    for stream, number in ((UNKNOWN, 0), (a, 1)):
        assert units.lease(stream, number, 3) == Lease(number, 3, 0, 0, 0, 0, is_open=False)
    assert units.lease(a, 0, 0).is_open


def test_a_closed_stream_keeps_its_leases_and_gets_no_more(units, a):
    first = units.lease(a, 0, 0)
    units.close(a)
    assert units.lease(a, 0, 0) == first
    for number in (1, 1, 2):
        assert units.lease(a, number, 4) == Lease(number, 4, 0, 0, 0, first.stop, is_open=False)
    assert [p.epoch for p in units.dataset("c4").epochs] == [0]
    units.reopen(a, 0, "one")
    assert units.lease(a, 1, 0).unit == unit_order(0)[1], "what was empty then is not kept"


def test_nothing_available_is_an_empty_lease_and_stays_one(units, a, b):
    lease_all(units, a)
    assert units.lease(b, 0, 0) == Lease(0, 0, 0, 0, 0, 0)
    units.close(a)
    assert units.lease(b, 0, 0) == Lease(0, 0, 0, 0, 0, 0), "all ranks of a group get the same"
    rest = units.lease(b, 1, 0)
    assert (rest.number, rest.unit, rest.stream_start) == (1, unit_order(0)[0], 0)
    units.commit({b: (rest.stop, rest.stop)})
    assert counts(units) == (rest.stop, 0, LENGTH - rest.stop)


def test_empty_leases_between_others_do_not_disturb_the_stream(units, a, b):
    lease_all(units, a)
    units.lease(b, 0, 0)
    units.close(a)
    sizes = [units.lease(b, 1, 0).stop, units.lease(b, 2, 0).stop]
    for number in (3, 4, 5, 6):
        units.lease(b, number, 0)
    for position in range(sum(sizes) + 1):
        units.commit({b: (position, position)})
        assert counts(units)[0] == position
    for position in reversed(range(sum(sizes) + 1)):
        units.rewind({b: (position, position)})
        assert counts(units)[0] == position


def test_threads_get_each_sample_once(units):
    got = []

    def take(name):
        stream, number = open_stream(units, name), 0
        while (lease := units.lease(stream, number, 0)).stop:
            got.extend(samples(lease))
            number += 1

    threads = [threading.Thread(target=take, args=(f"thread {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == len(set(got)) == LENGTH


# Commits and closing.


def test_samples_of_leases_that_were_lost_are_counted(units, a, b):
    size = units.lease(a, 0, 0).stop
    units.lease(b, 0, 0)
    ledger = {UNKNOWN: (4, 6), a: (size + 1, size + 2), b: (1, 2), UNKNOWN + 1: (0, 0)}
    for _ in range(2):
        assert units.commit(ledger) == {UNKNOWN: 6, a: 2}
        assert counts(units)[0] == size + 1, "the rest of it is recorded"


def test_a_record_with_a_gap_lets_a_run_resume(units, a):
    stop = units.lease(a, 0, 0).stop
    ledger = {a: (stop + 3, stop + 3), UNKNOWN: (2, 2)}
    with pytest.raises(UnknownStream):
        units.rewind(ledger)
    assert units.gap is None
    for outer_step, lost in ((4, 5), (9, 3), (9, 6)):
        units.widen_gap(outer_step, lost)
    assert units.gap == {"outer_step": 4, "samples": 6}, (
        "complete up to the first, and the most samples"
    )
    units.rewind(ledger)
    units.reopen(a, stop + 5, "one")
    units.reopen(UNKNOWN, 7, "one")
    assert counts(units)[0] == stop
    assert not units.lease(a, 2, 0).is_open and not units.lease(UNKNOWN, 1, 0).is_open


def test_what_was_left_in_part_of_the_model_is_counted_once(units, a, b):
    first, second = units.lease(a, 0, 0), units.lease(a, 1, 1)
    units.commit({a: (1, first.stop + 2)})
    assert in_part(units) == 0, "it may still come into all of it"
    assert units.close(a) == (first.stop + second.stop - 1, first.stop + 1)
    assert units.close(a) == (0, 0)
    assert in_part(units) == first.stop + 1
    units.commit({a: (1, first.stop + 3)})
    assert in_part(units) == first.stop + 2, "the ledger of a last sync that came late"
    units.rewind({a: (1, 2)})
    assert in_part(units) == 1
    units.reopen(a, first.stop, "one")
    assert in_part(units) == 0
