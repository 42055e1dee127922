"""Work units after a rewind, a reopening, and damage to the file.

Run: pytest tests/coordinator/test_work_units_recover.py. In one process, a file of SQLite in a
temporary folder.
"""

import numpy as np
import pytest

from composer_replication.coordinator.database import StorageError
from composer_replication.coordinator.work_units import leases as unit_leases
from composer_replication.coordinator.work_units.tables import (
    StreamClosed,
    UnknownStream,
)
from composer_replication.coordinator.work_units.work_units import EpochProgress
from coordinator.small_units import (
    UNKNOWN,
    counts,
    lease_all,
    open_ones,
    open_stream,
    twice,
    unit_order,
)

# Rewinding and reopening.


def test_after_a_rewind_the_model_has_what_the_ledger_says(units, a, b):
    sizes = [units.lease(stream, 0, 0).stop for stream in (a, b)]
    units.commit({a: (2, 2), b: (3, 3)})
    units.close(b)
    assert counts(units)[:2] == (5, sizes[0] - 2)
    for _ in range(2):
        units.rewind({a: (1, 1), b: (1, 1), UNKNOWN: (0, 0)})
        assert counts(units)[:2] == (2, sizes[0] - 1), "a holds its own, b's are available"
    units.rewind({a: (3, 4)})
    assert counts(units)[:2] == (3, sizes[0] - 3), "forward, if it had not heard of that yet"


def test_a_rewind_to_another_run_s_checkpoint_changes_nothing(units, a):
    stop = units.lease(a, 0, 0).stop
    units.commit({a: (2, 2)})
    with pytest.raises(UnknownStream):
        units.rewind({a: (1, 1), UNKNOWN: (0, 1)})
    assert counts(units)[:2] == (2, stop - 2)


def test_a_rewind_forgets_what_was_trained_twice_after_it(units, a, b):
    units.lease(a, 0, 0)
    units.commit({a: (1, 1)})
    units.close(a)
    units.lease(b, 0, 0)
    units.commit({a: (3, 3)})
    assert twice(units) == 2
    units.rewind({a: (1, 1)})
    assert twice(units) == 0


def test_a_reopened_stream_goes_on(units, a):
    first, second = units.lease(a, 0, 0), units.lease(a, 1, 0)
    units.commit({a: (first.stop + 2, first.stop + 2)})
    units.close(a)
    units.rewind({a: (2, 2)})
    for _ in range(2):
        units.reopen(a, 4, "its next session")
    assert open_ones(units) == [(a, "replica of a", "its next session")]
    assert counts(units)[:2] == (2, first.stop + second.stop - 2)
    assert units.lease(a, 1, 0) == second
    assert units.lease(a, 2, 0).stream_start == first.stop + second.stop
    units.commit({a: (first.stop, first.stop)})
    assert counts(units)[0] == first.stop


@pytest.mark.parametrize("done", [False, True])
def test_a_stream_whose_samples_others_have_cannot_be_reopened(units, a, b, done):
    lease = units.lease(a, 0, 0)
    units.commit({a: (1, 1)})
    units.close(a)
    units.lease(b, 0, 0)
    if done:
        units.commit({b: (1, 1)})
        units.close(b)
    taken = 1 if done else lease.stop - 1
    with pytest.raises(
        StreamClosed, match=f"{taken} of its {lease.stop - 1} uncommitted samples .* others"
    ):
        units.reopen(a, 2, "one")
    assert a not in [key for key, _, _ in open_ones(units)]


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_is_reopened_between_its_commit_and_its_end(units, a, is_closed):
    stop = units.lease(a, 0, 0).stop
    units.commit({a: (2, 2)})
    if is_closed:
        units.close(a)
    for position in (1, stop + 1):
        with pytest.raises(ValueError, match=f"at position {position}: 2 samples are committed"):
            units.reopen(a, position, "one")
    units.reopen(a, stop, "one")


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
    units.commit({a: (position, position)})
    assert counts(units)[0] == leases[0].stop + 1
    units.close(a)
    rest = units.lease(b, 0, 0)
    assert (rest.unit, rest.start) == (leases[2].unit, 1)
    assert units.lease(b, 1, 0).unit == unit_order(0)[3]


def test_a_damaged_lease_does_not_free_its_samples_for_another(units, a, b, c, database):
    for stream in (a, b, c):
        stop = units.lease(stream, 0, 0).stop
        if stream != c:
            units.commit({stream: (1, 1)})
            units.close(stream)
    with database.transaction() as cursor:
        cursor.execute("UPDATE leases SET stop = 'x' WHERE start = 1")
    units.close(c)
    d = open_stream(units, "d")
    lease = units.lease(d, 0, 0)
    assert (lease.unit, lease.start, lease.stop) == (unit_order(0)[0], 2, stop)
    assert units.lease(d, 1, 0).unit == unit_order(0)[1]
    assert counts(units)[0] == 2


@pytest.mark.parametrize("damage", ["position = 'x'", "in_part = -1", "at_lease = 0.5"])
def test_a_damaged_stream_is_as_if_it_were_not_there(units, a, b, database, caplog, damage):
    for stream in (a, b):
        units.lease(stream, 0, 0)
    with database.transaction() as cursor:
        cursor.execute(f"UPDATE streams SET {damage} WHERE key = ?", (a,))
    assert units.commit({a: (1, 1), b: (2, 2)}) == {a: 1}
    assert counts(units)[0] == 2 and "damaged row" in caplog.text
    assert not units.lease(a, 1, 0).is_open
    units.rewind({})
    assert counts(units)[0] == 0


def test_a_stream_that_has_lost_count_of_its_leases_does_not_go_on(units, a, database):
    units.lease(a, 0, 0)
    with database.transaction() as cursor:
        cursor.execute("UPDATE streams SET leases = 0")
    with pytest.raises(StreamClosed, match=f"Lease 0 of stream {a} is damaged"):
        units.lease(a, 0, 0)


def test_damaged_epochs_and_datasets_are_told(units, a, database):
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

    monkeypatch.setattr(unit_leases, "unit_order", other_numpy)
    with pytest.raises(StorageError, match="shuffles epoch 0 of dataset 'c4' differently"):
        units.lease(a, 1, 0)


def test_a_million_units_cost_nothing_until_they_are_leased(units, path):
    units.create_dataset("large", 64_000_000, 0, 64)
    stream = units.open_stream("a", "large", "0", "one")
    units.lease(stream, 0, 0)
    assert path.stat().st_size + path.with_name(path.name + "-wal").stat().st_size < 1e6
    assert units.dataset("large").epochs == [EpochProgress(0, 64_000_000, 0, 64, 63_999_936, 0, 0)]
