"""The settings of a run, version by version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.journal import Journal
from composer_replication.diloco.settings import DiLoCoSettings

CHANGEABLE = ("outer_lr", "outer_momentum", "sync_every")
"""Settings that a run may change while it goes on."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (
    version INTEGER PRIMARY KEY, settings TEXT NOT NULL, source TEXT NOT NULL,
    is_config INTEGER NOT NULL
)
"""


class RefusedError(ValueError):
    """A replica group, or a change of settings, that does not fit the run."""


class RunSettings:
    """The authority on the settings that all replica groups of a run have.

    Args:
        database: Where they are kept.
        journal: Told of changes.
        settings: Those of the config. If it has changed since this state was last served, they
            are a new version; changes made meanwhile stay while it has not.
        source: Where they come from, for people.
        all_start: Whether all replica groups start together with this service, so that any setting
            may have changed. Else groups may be in training, and hear of some changes only.

    Attributes:
        newest_version: The number of the newest version, without a look at the database.

    Raises:
        RefusedError: The config has changed in what groups in training cannot adopt.
    """

    def __init__(
        self,
        database: Database,
        journal: Journal,
        settings: DiLoCoSettings,
        source: str,
        all_start: bool = False,
    ) -> None:
        self._database = database
        self._journal = journal
        database.execute_schema(_SCHEMA)
        with database.transaction() as cursor:
            row = cursor.execute(
                "SELECT settings FROM settings WHERE is_config ORDER BY version DESC LIMIT 1"
            ).fetchone()
            (newest,) = cursor.execute("SELECT max(version) FROM settings").fetchone()
        self.newest_version: int = newest or 0
        served = None if row is None else json.loads(row[0])
        if served == json.loads(json.dumps(asdict(settings))):
            return
        if served is not None and not all_start:
            _check_adoptable(served, settings)
        self._add(settings, source, is_config=True)

    def _add(self, settings: DiLoCoSettings, source: str, *, is_config: bool) -> int:
        with self._database.transaction() as cursor:
            cursor.execute(
                "INSERT INTO settings SELECT coalesce(max(version), 0) + 1, ?, ?, ? FROM settings",
                (json.dumps(asdict(settings)), source, is_config),
            )
            (version,) = cursor.execute("SELECT max(version) FROM settings").fetchone()
        self.newest_version = version
        if version > 1:
            self._journal.tell(f"settings version {version}: {source}")
        return version

    def newest(self) -> tuple[int, DiLoCoSettings, str]:
        """The newest version, the settings, and where they come from."""
        with self._database.transaction() as cursor:
            version, text, source = cursor.execute(
                "SELECT version, settings, source FROM settings ORDER BY version DESC LIMIT 1"
            ).fetchone()
        return version, DiLoCoSettings(**json.loads(text)), source

    def of(self, version: int) -> DiLoCoSettings:
        """One version.

        Raises:
            RefusedError: There is no such version.
        """
        with self._database.transaction() as cursor:
            row = cursor.execute(
                "SELECT settings FROM settings WHERE version = ?", (version,)
            ).fetchone()
        if row is None:
            raise RefusedError(f"there are no settings of version {version}")
        return DiLoCoSettings(**json.loads(row[0]))

    def change(self, changes: Mapping[str, Any]) -> int:
        """Add a version with some settings changed, and return its number.

        Groups hear of it with their heartbeats, and adopt it at one and the same outer step.

        Raises:
            RefusedError: A setting cannot be changed in mid-run, or the value is out of range.
        """
        fixed = sorted(changes.keys() - set(CHANGEABLE))
        if fixed:
            raise RefusedError(
                f"{', '.join(fixed)} cannot change while the run goes on: only "
                f"{', '.join(CHANGEABLE)} can"
            )
        version, settings, source = self.newest()
        try:
            changed = DiLoCoSettings(**asdict(settings) | dict(changes))
        except (TypeError, ValueError) as error:
            raise RefusedError(str(error)) from error
        if changed == settings:
            return version
        told = ", ".join(f"{name} {getattr(settings, name)} -> {v}" for name, v in changes.items())
        return self._add(changed, f"{source.partition(';')[0]}; {told}", is_config=False)


def _check_adoptable(before: Mapping[str, Any], now: DiLoCoSettings) -> None:
    told = [
        f"{name} {before.get(name)!r} before, {value!r} now"
        for name, value in json.loads(json.dumps(asdict(now))).items()
        if before.get(name) != value and name not in CHANGEABLE
    ]
    if told:
        raise RefusedError(
            f"the state folder is of a run with other settings ({', '.join(told)}), which groups "
            "in training cannot adopt: use another state folder for another run"
        )
