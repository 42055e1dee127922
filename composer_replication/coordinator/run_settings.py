"""The settings of a run, version by version."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from composer_replication.coordinator.database import Database
from composer_replication.coordinator.journal import Journal
from composer_replication.diloco.fingerprints import check_turns
from composer_replication.diloco.outer_table import resolve
from composer_replication.diloco.settings import CHANGEABLE, DiLoCoSettings

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (
    version INTEGER PRIMARY KEY, settings TEXT NOT NULL, source TEXT NOT NULL,
    is_config INTEGER NOT NULL
)
"""


class RejectedError(ValueError):
    """A replica group, or a change of settings, that does not fit the run."""


class RunSettings:
    """The settings that all replica groups of a run have, in all their versions.

    Args:
        database: Holds the versions.
        journal: Receives changes.
        settings: The settings of the config. If the config has changed since this state folder was
            last served, they become a new version. If not, later changes stay in force.
        source: Where the settings come from, for people.
        all_start: Whether all replica groups start together with this service, so that every
            setting may have changed. Otherwise groups may be training, and only ``CHANGEABLE``
            settings may have changed.
        num_replicas: How many replica groups the run begins with. What is ``auto`` is chosen by it
            when the state folder is served for the first time, and kept from then on.

    Attributes:
        newest_version: Number of the newest version. Reading it does not use the database.

    Raises:
        RejectedError: The config has changed in a setting that groups in training cannot adopt.
    """

    def __init__(
        self,
        database: Database,
        journal: Journal,
        settings: DiLoCoSettings,
        source: str,
        all_start: bool = False,
        num_replicas: int | None = None,
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
        # A version with fewer settings behaved as by the defaults of those that it did not have.
        served = None if row is None else _as_stored(DiLoCoSettings(**json.loads(row[0])))
        settings, auto = resolve(settings, num_replicas, served)
        if auto:
            log.info("%s", auto)
            source = f"{source}; {auto}"
        if served == _as_stored(settings):
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
            self._journal.add(f"settings version {version}: {source}")
        return version

    def newest(self) -> tuple[int, DiLoCoSettings, str]:
        """Return the number of the newest version, its settings, and where they come from."""
        with self._database.transaction() as cursor:
            version, text, source = cursor.execute(
                "SELECT version, settings, source FROM settings ORDER BY version DESC LIMIT 1"
            ).fetchone()
        return version, DiLoCoSettings(**json.loads(text)), source

    def of(self, version: int) -> DiLoCoSettings:
        """Return the settings of one version.

        Raises:
            RejectedError: There is no such version.
        """
        with self._database.transaction() as cursor:
            row = cursor.execute(
                "SELECT settings FROM settings WHERE version = ?", (version,)
            ).fetchone()
        if row is None:
            raise RejectedError(
                f"there is no settings version {version}: the newest is {self.newest_version}"
            )
        return DiLoCoSettings(**json.loads(row[0]))

    def changes(self) -> list[dict[str, Any]]:
        """The changes since the run's first settings: ``version``, and its ``source`` in words."""
        with self._database.transaction() as cursor:
            rows = cursor.execute(
                "SELECT version, source FROM settings WHERE version > 1 ORDER BY version"
            ).fetchall()
        return [{"version": version, "source": source} for version, source in rows]

    def change(self, changes: Mapping[str, Any]) -> int:
        """Add a version in which some settings have changed.

        Groups learn of it from the answers to their heartbeats, and adopt it at the same outer
        step.

        Args:
            changes: New values by name.

        Returns:
            The number of the new version; that of the newest one if nothing changes.

        Raises:
            RejectedError: A setting cannot change during training, or a value is out of range, or
                ``outer_schedule`` has its own values for it.
        """
        fixed = sorted(changes.keys() - set(CHANGEABLE))
        if fixed:
            raise RejectedError(
                f"{', '.join(fixed)} cannot change while the run goes on: change one of "
                f"{', '.join(CHANGEABLE)}"
            )
        version, settings, source = self.newest()
        try:
            changed = DiLoCoSettings(**asdict(settings) | dict(changes))
            check_turns(settings, changed)
        except (TypeError, ValueError) as error:
            raise RejectedError(str(error)) from error
        scheduled = sorted(changes.keys() & {"outer_lr", "outer_momentum"})
        if scheduled and changed.outer_schedule and "outer_schedule" not in changes:
            first = changed.outer_schedule[0][0]
            raise RejectedError(
                f"{', '.join(scheduled)}: this run has an outer_schedule, which sets it from outer "
                f"step {first} on. Change outer_schedule, or end it with outer_schedule=[] beside "
                "the new value"
            )
        if changed == settings:
            return version
        text = ", ".join(f"{name} {getattr(settings, name)} -> {v}" for name, v in changes.items())
        return self._add(changed, f"{source.partition(';')[0]}; {text}", is_config=False)


def _as_stored(settings: DiLoCoSettings) -> dict[str, Any]:
    """The settings as they are read from the database: a tuple is a list there."""
    return json.loads(json.dumps(asdict(settings)))


def _check_adoptable(before: Mapping[str, Any], now: DiLoCoSettings) -> None:
    differing = [
        f"{name} {before.get(name)!r} before, {value!r} now"
        for name, value in json.loads(json.dumps(asdict(now))).items()
        if before.get(name) != value and name not in CHANGEABLE
    ]
    if differing:
        raise RejectedError(
            f"the state folder belongs to a run with other settings ({', '.join(differing)}), "
            "which groups in training cannot adopt: use another state folder for another run"
        )
