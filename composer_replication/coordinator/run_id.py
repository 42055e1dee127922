"""The id of a run that has a coordinator: kept with its state, so that a restart keeps it."""

from __future__ import annotations

import secrets
import time

from composer_replication.coordinator.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (only INTEGER PRIMARY KEY CHECK (only = 1), id TEXT NOT NULL);
"""


def keep_run_id(database: Database, named: str | None = None) -> str:
    """Return the id of the run whose state this is.

    Args:
        database: Holds the id from the first call on.
        named: An id for a new run. None: the time of the first call and four random digits.
    """
    database.execute_schema(_SCHEMA)
    new = named or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    with database.transaction() as cursor:
        cursor.execute("INSERT OR IGNORE INTO run VALUES (1, ?)", (new,))
        (run_id,) = cursor.execute("SELECT id FROM run").fetchone()
    return run_id
