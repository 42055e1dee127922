"""Work units of a small data set, and three streams of them."""

import pytest

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.work_units import WorkUnits


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
    units.create_dataset("c4", length=23, seed=7, unit_size=5)
    return units


def _open_stream(units, name):
    return units.open_stream(name, "c4", f"replica of {name}", f"session of {name}")


@pytest.fixture
def a(units):
    return _open_stream(units, "a")


@pytest.fixture
def b(units, a):
    return _open_stream(units, "b")


@pytest.fixture
def c(units, b):
    return _open_stream(units, "c")
