"""Work units: what a name, a gap, threads, damage and a size do to them.

Run: pytest tests/coordinator/test_work_units.py. In one process, a file of SQLite in a temporary
folder. Which samples are leased, done and available, after all calls in any order, is in
test_work_units_in_any_order.py; the answers to groups, in test_api.py.
"""

import threading

import numpy as np
import pytest

from composer_replication.coordinator import accounting
from composer_replication.coordinator.database import Database, StorageError
from composer_replication.coordinator.tables import DatasetMismatch, StreamClosed, UnknownStream
from composer_replication.coordinator.work_units import EpochProgress, WorkUnits
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
    unit_order,
)


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
    assert open_stream(units, "a") == a, "it gets the same answer, and is still closed"
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


def test_a_record_with_a_gap_lets_a_run_resume(units, a):
    stop = units.lease(a, 0, 0).stop
    ledger = [(a, stop + 3, stop + 3), (UNKNOWN, 2, 2)]
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


# The file: damage, another NumPy, a large dataset.


@pytest.mark.parametrize(
    "damage", ["start = 'x'", "stop = start", "stream_start = -1", "stop = NULL", "place = 1.5"]
)
def test_a_damaged_lease_is_skipped_with_a_warning(units, a, b, database, caplog, damage):
    leases = [units.lease(a, number, 0) for number in range(3)]
    with database.transaction() as cursor:
        cursor.execute(f"UPDATE leases SET {damage} WHERE number = 1")
    with pytest.raises(StreamClosed, match=f"Lease 1 of stream {a} is damaged"):
        units.lease(a, 1, 0)
    assert "damaged row" in caplog.text and "number=1" in caplog.text

    assert units.lease(a, 2, 0) == leases[2]
    position = leases[2].stream_start + 1
    units.commit([(a, position, position)])
    assert counts(units)[0] == leases[0].stop + 1
    units.close(a)
    rest = units.lease(b, 0, 0)
    assert (rest.unit, rest.start) == (leases[2].unit, 1)
    assert units.lease(b, 1, 0).unit == unit_order(0)[3]


@pytest.mark.parametrize("damage", ["position = 'x'", "in_part = -1", "samples = 0.5"])
def test_a_damaged_stream_is_as_if_it_were_not_there(units, a, b, database, caplog, damage):
    for stream in (a, b):
        units.lease(stream, 0, 0)
    with database.transaction() as cursor:
        cursor.execute(f"UPDATE streams SET {damage} WHERE key = ?", (a,))
    assert units.commit([(a, 1, 1), (b, 2, 2)]) == {a: 1}
    assert counts(units)[0] == 2 and "damaged row" in caplog.text
    assert not units.lease(a, 1, 0).is_open
    units.rewind([])
    assert counts(units)[0] == 0


@pytest.mark.parametrize("version", [2, 3])
def test_a_file_of_an_older_schema_version_is_read_on(units, a, b, database, path, version):
    lease_all(units, a)
    units.commit([(a, 8, 8)])
    with database.transaction() as cursor:
        if version == 2:
            cursor.execute("ALTER TABLE streams ADD COLUMN at_lease INTEGER NOT NULL DEFAULT 0")
        cursor.execute("ALTER TABLE datasets DROP COLUMN shuffle")
        cursor.execute(f"PRAGMA user_version = {version}")
    database.close()
    again = Database(path)
    units = WorkUnits(again)
    units.commit([(a, 9, 9)])
    units.close(a)
    assert counts(units) == (9, 0, 14)
    assert units.lease(b, 0, 0).stop
    # It does not say whether units are shuffled: the first group does.
    units.create_dataset("c4", LENGTH, SEED, UNIT_SIZE, shuffle=False)
    with pytest.raises(DatasetMismatch, match="shuffle 0, not 1"):
        units.create_dataset("c4", LENGTH, SEED, UNIT_SIZE)
    again.close()


def test_damaged_epochs_and_datasets_are_reported(units, a, database):
    units.lease(a, 0, 0)
    with database.transaction() as cursor:
        cursor.execute("UPDATE epochs SET done = 'x'")
    assert units.dataset("c4").epochs == []
    with pytest.raises(StorageError, match="Epoch 0 of dataset 'c4' is damaged"):
        units.lease(a, 1, 0)
    with database.transaction() as cursor:
        cursor.execute("UPDATE datasets SET unit_size = 0")
    assert units.datasets() == []
    for call in (lambda: units.dataset("c4").epochs, lambda: units.lease(a, 1, 0)):
        with pytest.raises(StorageError, match="Dataset .* is damaged"):
            call()


def test_a_damaged_range_does_not_hold_up_the_others(units, a, b, database, caplog):
    for number in range(2):
        units.lease(a, number, 0)
    units.close(a)
    with database.transaction() as cursor:
        cursor.execute("UPDATE returned SET stop = 0 WHERE place = 0")
    assert units.lease(b, 0, 0).unit == unit_order(0)[1]
    assert "damaged row" in caplog.text


def test_an_epoch_whose_last_range_is_damaged_does_not_hold_up_the_next(units, a, b, database):
    lease_all(units, a)
    units.close(a)
    with database.transaction() as cursor:
        cursor.execute("UPDATE returned SET stop = 0")
    assert units.lease(b, 0, 1).epoch == 1


def test_an_epoch_is_not_continued_in_another_order(units, a, monkeypatch):
    units.lease(a, 0, 0)

    def other_numpy(seed, epoch, num_units):
        return np.arange(num_units), 0

    monkeypatch.setattr(accounting, "unit_order", other_numpy)
    with pytest.raises(StorageError, match="shuffles epoch 0 of dataset 'c4' differently"):
        units.lease(a, 1, 0)


def test_a_million_units_cost_nothing_until_they_are_leased(units, path):
    units.create_dataset("large", 64_000_000, 0, 64)
    stream = units.open_stream("a", "large", "0", "one")
    units.lease(stream, 0, 0)
    assert path.stat().st_size + path.with_name(path.name + "-wal").stat().st_size < 1e6
    assert units.dataset("large").epochs == [EpochProgress(0, 64_000_000, 0, 64, 63_999_936, 0, 0)]
