"""The datasets of a run, and how far each is."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from composer_replication.coordinator.run_settings import RefusedError
from composer_replication.coordinator.work_units.tables import (
    MAX_UNITS,
    DatasetMismatch,
    DatasetRow,
    EpochRow,
    find_dataset,
    understood,
)


@dataclass(frozen=True)
class EpochProgress:
    """Samples of an epoch; ``done``, ``leased`` and ``available`` add up to ``length``."""

    epoch: int
    length: int
    done: int
    leased: int
    available: int
    trained_in_part: int
    """Left in some fragments of the model by streams that ended: they are trained again."""
    trained_twice: int


@dataclass(frozen=True)
class DatasetProgress:
    """A dataset, and how far each epoch that has been begun is; sizes in samples."""

    dataset_id: str
    length: int
    seed: int
    unit_size: int
    epochs: list[EpochProgress]
    trained_in_part: int
    trained_twice: int


def add_dataset(
    cursor: sqlite3.Cursor, dataset_id: str, length: int, seed: int, unit_size: int
) -> None:
    """Make a dataset known; one that is known has to be the same.

    Raises:
        DatasetMismatch: It is known with another length, seed or unit size.
        RefusedError: It would have too many units.
    """
    if (num_units := -(-length // unit_size)) > MAX_UNITS:
        raise RefusedError(
            f"unit_size={unit_size} makes {num_units:,} units of {length:,} samples, and "
            f"{MAX_UNITS:,} are the most: use {-(-length // MAX_UNITS)} or more."
        )
    cursor.execute(
        "INSERT OR IGNORE INTO datasets (dataset_id, length, seed, unit_size) VALUES (?, ?, ?, ?)",
        (dataset_id, length, seed, unit_size),
    )
    known = find_dataset(cursor, dataset_id)
    wanted = {"length": length, "seed": seed, "unit_size": unit_size}
    differ = [
        f"{name} {getattr(known, name)}, not {value}"
        for name, value in wanted.items()
        if getattr(known, name) != value
    ]
    if differ:
        raise DatasetMismatch(
            f"Dataset {dataset_id!r} is known with {' and '.join(differ)}. "
            "Ask for the same, or give the other data another dataset_id."
        )


def progress_of(cursor: sqlite3.Cursor, dataset: DatasetRow) -> DatasetProgress:
    """How far a dataset is; of epochs that have been begun."""
    rows = cursor.execute(
        "SELECT * FROM epochs WHERE dataset = ? ORDER BY epoch", (dataset.key,)
    ).fetchall()
    epochs = [
        EpochProgress(
            row.epoch,
            dataset.length,
            row.done,
            row.leased,
            dataset.length - row.done - row.leased,
            row.trained_in_part,
            row.trained_twice,
        )
        for row in filter(understood, map(EpochRow._make, rows))
    ]
    return DatasetProgress(
        dataset.dataset_id,
        dataset.length,
        dataset.seed,
        dataset.unit_size,
        epochs,
        sum(epoch.trained_in_part for epoch in epochs),
        sum(epoch.trained_twice for epoch in epochs),
    )


def progress_of_all(cursor: sqlite3.Cursor) -> list[DatasetProgress]:
    """All datasets, in the order in which they became known."""
    rows = cursor.execute("SELECT * FROM datasets ORDER BY key").fetchall()
    known = filter(understood, map(DatasetRow._make, rows))
    return [progress_of(cursor, dataset) for dataset in known]
