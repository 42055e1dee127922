"""A run keeps its id. Run: pytest tests/coordinator/test_run_id.py. Pure but for a file."""

import re
from contextlib import closing

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.run_id import keep_run_id


def test_a_run_keeps_the_id_that_it_has_got_first(path):
    with closing(Database(path)) as database:
        first = keep_run_id(database)
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", first)
    with closing(Database(path)) as again:
        assert keep_run_id(again) == keep_run_id(again, "exp-8") == first


def test_a_new_run_may_be_named(database):
    assert keep_run_id(database, "exp-7") == keep_run_id(database) == "exp-7"
