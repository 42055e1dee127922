"""Datasets of a run, and how many of their samples are done."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from composer_replication.coordinator.run_settings import RejectedError
from composer_replication.coordinator.work_units.tables import (
    MAX_UNITS,
    DatasetMismatch,
    DatasetRow,
    EpochRow,
    find_dataset,
    is_valid_row,
)


@dataclass(frozen=True)
class EpochProgress:
    """Samples of an epoch; ``done``, ``leased`` and ``available`` add up to ``length``.

    Attributes:
        epoch: Number of the epoch, from 0.
        length: Samples of the dataset.
        done: Samples that are in the model and not leased.
        leased: Samples that an open stream holds and that are not in the model.
        available: Samples that the next leases may have.
        trained_in_part: Samples that closed streams left in some fragments of the model only. They
            are trained on again.
        trained_twice: How often a sample was in the model once more than it should be.
    """

    epoch: int
    length: int
    done: int
    leased: int
    available: int
    trained_in_part: int
    trained_twice: int


@dataclass(frozen=True)
class DatasetProgress:
    """A dataset and the progress of every epoch that has begun. All sizes are in samples."""

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
    """Add a dataset. One that exists already has to be the same.

    Raises:
        DatasetMismatch: The dataset exists with another length, seed or unit size.
        RejectedError: The dataset would have too many units.
    """
    if (num_units := -(-length // unit_size)) > MAX_UNITS:
        raise RejectedError(
            f"unit_size={unit_size} makes {num_units:,} units of {length:,} samples, and at most "
            f"{MAX_UNITS:,} are allowed: use a unit_size of {-(-length // MAX_UNITS)} or more."
        )
    cursor.execute(
        "INSERT OR IGNORE INTO datasets (dataset_id, length, seed, unit_size) VALUES (?, ?, ?, ?)",
        (dataset_id, length, seed, unit_size),
    )
    dataset = find_dataset(cursor, dataset_id)
    requested = {"length": length, "seed": seed, "unit_size": unit_size}
    differing = [
        f"{name} {getattr(dataset, name)}, not {value}"
        for name, value in requested.items()
        if getattr(dataset, name) != value
    ]
    if differing:
        raise DatasetMismatch(
            f"Dataset {dataset_id!r} exists with {' and '.join(differing)}. "
            "Use the same values, or another dataset_id for other data."
        )


def progress_of(cursor: sqlite3.Cursor, dataset: DatasetRow) -> DatasetProgress:
    """The progress of a dataset, for the epochs that have begun."""
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
        for row in filter(is_valid_row, map(EpochRow._make, rows))
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
    """The progress of all datasets, in the order in which they were added."""
    rows = cursor.execute("SELECT * FROM datasets ORDER BY key").fetchall()
    return [progress_of(cursor, row) for row in map(DatasetRow._make, rows) if is_valid_row(row)]
