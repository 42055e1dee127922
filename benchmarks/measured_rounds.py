"""The rounds that benchmarks/bandwidth.py measured, and what the model says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.plan import PlannedRun, ddp_step_seconds, round_seconds

SYNCING = ("vanilla", "streaming")
METHODS = ("none", "DDP", *SYNCING)


@dataclass(frozen=True)
class Row:
    """A measured round: its method, what it was, and the seconds it took."""

    method: str
    run: PlannedRun
    round_s: float


def read_rows(table: Mapping[str, Any]) -> list[Row]:
    """The rows of a table.

    Each is a round of ``sync_every`` inner steps, also of DDP and of ``none``, which sends nothing.
    ``bits_per_s`` is null where nobody has limited the link.

    Raises:
        ValueError: A row lacks something or is none, or nothing in the table has synced.
    """
    rows = []
    for number, found in enumerate(table.get("rows", [])):
        try:
            rows.append(_read_row(found))
        except KeyError as error:
            raise ValueError(f"row {number} has no {error}: measure with bandwidth.py") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {number}: {error}") from error
    if not any(row.method in SYNCING for row in rows):
        raise ValueError(f"none of {len(rows)} rows is vanilla or streaming: measure one of them")
    return rows


def _read_row(found: Mapping[str, Any]) -> Row:
    method, round_s = found["method"], float(found["round_s"])
    if method not in METHODS:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    if not 0 < round_s < math.inf:
        raise ValueError(f"round_s={round_s}: only seconds above 0 can be fitted")
    syncs = method in SYNCING
    run = PlannedRun(
        params=int(found["params"]),
        link_bits_per_s=float(found["bits_per_s"] or math.inf),
        step_s=float(found["step_s"]),
        groups=int(found["groups"]),
        round_trip_s=float(found["round_trip_s"]),
        sync_every=int(found["sync_every"]),
        num_fragments=int(found["num_fragments"]) if syncs else 1,
        fragment_sync_delay=int(found["fragment_sync_delay"]) if syncs else 0,
        wire_format=found["wire_format"] if syncs else "float32",
    )
    return Row(method, run, round_s)


def predict(row: Row, constants: Mapping[str, float]) -> float:
    """What the model says that the row took, in seconds."""
    if row.method == "none":
        return row.run.sync_every * row.run.step_s
    if row.method == "DDP":
        return row.run.sync_every * ddp_step_seconds(row.run, constants)
    return round_seconds(row.run, constants)


def errors_of(rows: Sequence[Row], constants: Mapping[str, float]) -> list[float]:
    """The relative error of each row, above 0 where the model says more than was measured."""
    return [predict(row, constants) / row.round_s - 1 for row in rows]
