"""The coordinator's file: transactions are whole and durable, and errors say what to do.

Run: pytest tests/coordinator/test_database.py. One process kills another; all else is in-process.
"""

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from composer_replication.coordinator.database import SCHEMA_VERSION, Database, StorageError

TABLE = "CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, text TEXT)"


@pytest.fixture
def database(database):
    with database.transaction() as cursor:
        cursor.execute(TABLE)
    return database


def insert(database, *numbers, text=""):
    with database.transaction() as cursor:
        cursor.executemany("INSERT INTO rows VALUES (?, ?)", [(n, text) for n in numbers])


def numbers(database):
    with database.transaction() as cursor:
        return [n for (n,) in cursor.execute("SELECT number FROM rows ORDER BY number")]


def test_a_transaction_that_fails_leaves_nothing_behind_nor_one_inside_it(database):
    with pytest.raises(KeyError), database.transaction():
        insert(database, 1)
        raise KeyError
    assert numbers(database) == []

    with pytest.raises(sqlite3.IntegrityError), database.transaction():
        insert(database, 2)
        insert(database, 3, 2)
    assert numbers(database) == []


WRITER = """
import itertools, sys
from composer_replication.coordinator.database import Database

database = Database(sys.argv[1])
with database.transaction() as cursor:
    cursor.execute(sys.argv[2])
for number in itertools.count():
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO rows VALUES (?, ?)", (number, "x" * 200))
    print(number, flush=True)
"""


@pytest.mark.integration
def test_a_process_that_is_killed_loses_nothing_that_it_has_answered(path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), TABLE], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        answered = [int(writer.stdout.readline()) for _ in range(100)]
        writer.send_signal(signal.SIGKILL)
        answered += [int(line) for line in writer.stdout if line.endswith("\n")]

    with closing(Database(path)) as database:
        kept = numbers(database)
        assert kept[: len(answered)] == answered
        # At most the one row that it was killed before it could answer.
        assert kept in (answered, [*answered, len(answered)])


def test_a_full_disk_is_an_error_of_that_call_alone(database, path):
    insert(database, 1)
    with database.transaction() as cursor:
        (pages,) = cursor.execute("PRAGMA page_count").fetchone()
        cursor.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StorageError, match=rf"{path}.* full: free some space"):
        insert(database, *range(2, 100), text="x" * 1000)
    assert numbers(database) == [1]

    with database.transaction() as cursor:
        cursor.execute("PRAGMA max_page_count = 1000000")
    insert(database, 2)
    assert numbers(database) == [1, 2], "it goes on when there is space again"


def test_a_file_that_cannot_be_written_is_a_storage_error(database):
    with database.transaction() as cursor:
        cursor.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError, match="make the file and its folder writable"):
        insert(database, 1)


@pytest.mark.parametrize("folder", ["missing", "/proc"])
def test_a_folder_without_room_for_a_file_is_a_storage_error(tmp_path, folder):
    with pytest.raises(
        StorageError, match=rf"{folder}/x.db: .* create its folder and make it writable"
    ):
        Database(tmp_path / folder / "x.db")


def test_a_second_writer_is_reported(database, path, monkeypatch):
    monkeypatch.setattr("composer_replication.coordinator.database.BUSY_TIMEOUT_S", 0.01)
    with (
        closing(Database(path)) as second,
        database.transaction(),
        pytest.raises(StorageError, match="stop the second coordinator"),
    ):
        insert(second, 1)


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_a_database_of_another_version_is_refused(path, version):
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE something (x)")
        other.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StorageError, match=f"has schema version {version}, this program has"):
        Database(path)


def test_closing_empties_the_log_and_ends_all_use(database, path):
    insert(database, 1)
    database.close()
    database.close()
    wal = path.with_name(path.name + "-wal")
    assert not wal.exists() or wal.stat().st_size == 0
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        insert(database, 2)
