"""Work units of a small data set, and three streams of them."""

import pytest

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.work_units import WorkUnits
from coordinator.small_units import LENGTH, SEED, UNIT_SIZE, open_stream


@pytest.fixture
def path(tmp_path):
    return tmp_path / "coordinator.db"


@pytest.fixture
def database(path):
    database = Database(path)
    yield database
    database.close()


@pytest.fixture
def units(database):
    units = WorkUnits(database)
    units.create_dataset("c4", LENGTH, SEED, UNIT_SIZE)
    return units


@pytest.fixture
def a(units):
    return open_stream(units, "a")


@pytest.fixture
def b(units, a):
    return open_stream(units, "b")


@pytest.fixture
def c(units, b):
    return open_stream(units, "c")
