"""The settings of a run, which its state folder keeps."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from composer_replication.coordinator.database import Database, RejectedError
from composer_replication.coordinator.events import Events
from composer_replication.settings import DiLoCoSettings, differing

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (
    only INTEGER PRIMARY KEY CHECK (only = 1), settings TEXT NOT NULL, source TEXT NOT NULL
)
"""


def store_settings(
    database: Database,
    events: Events,
    settings: DiLoCoSettings,
    source: str,
    all_start: bool = False,
) -> None:
    """Keep the settings that all replica groups of a run have, from its start to its end.

    Args:
        database: Keeps them.
        events: Receives what has changed since this state folder was last served.
        settings: The settings of the config.
        source: Where they come from, for people.
        all_start: Whether all replica groups start with this service, so that settings may have
            changed since it was last served. Otherwise groups may be training with those of before.

    Raises:
        RejectedError: Settings have changed, and groups may be training.
    """
    database.execute_schema(_SCHEMA)
    now = _as_stored(settings)
    with database.transaction() as cursor:
        row = cursor.execute("SELECT settings FROM settings").fetchone()
        before = now if row is None else _of_this_version(json.loads(row[0]))
        changes = ", ".join(
            f"{name} {before[name]!r} before, {now[name]!r} now" for name in differing(before, now)
        )
        if changes and not all_start:
            raise RejectedError(
                f"the state folder belongs to a run with other settings ({changes}), and groups in "
                "training keep those with which they started. Use the settings of before; or stop "
                "all groups, and start this coordinator with --new-settings before they resume; "
                "or use another state folder for another run"
            )
        new = json.dumps(now), source
        cursor.execute("INSERT OR REPLACE INTO settings VALUES (1, ?, ?)", new)
        if changes:
            events.add(f"new settings from {source}: {changes}")


def _as_stored(settings: DiLoCoSettings) -> dict[str, Any]:
    """The settings as they are read from the database: a tuple is a list there."""
    return json.loads(json.dumps(asdict(settings)))


def _of_this_version(stored: dict[str, Any]) -> dict[str, Any]:
    """Settings that another version has stored: without those that are gone, with new defaults."""
    known = _as_stored(DiLoCoSettings())
    return known | {name: value for name, value in stored.items() if name in known}
