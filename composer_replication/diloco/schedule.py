"""The schedule of a run: outer steps from which other numbers are in force. Imports no torch.

It is a step function of the outer step, which is the same in all replica groups. So it needs no
message: a group that resumes, or that joins late, knows its row from the outer step alone.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.diloco.checks import check_integer, check_number

KEYS = ("sync_every", "outer_lr", "outer_momentum")
"""What a row may change."""

MAX_ROWS = 64
"""Groups compare the whole schedule when they start, in a message of a fixed size."""

_FORM = "{outer_step: 61, sync_every: 30}"

Rows = Sequence[Mapping[str, Any]]


def check_rows(schedule: object) -> Rows | None:
    """Check a schedule.

    Args:
        schedule: Rows, each a mapping with ``outer_step`` and any of ``KEYS``; or None.

    Returns:
        The rows, with floats where numbers may be fractions; None if there are none.

    Raises:
        ValueError: It is no list of such rows, a number is out of range, or the outer steps do not
            ascend. The message has the row, the value and the fix.
    """
    if schedule is None:
        return None
    if not isinstance(schedule, Sequence) or isinstance(schedule, str | bytes):
        raise ValueError(f"schedule={schedule!r}: give a list of rows such as {_FORM}, or null")
    if len(schedule) > MAX_ROWS:
        raise ValueError(f"schedule has {len(schedule)} rows: use at most {MAX_ROWS}")
    rows: list[Mapping[str, Any]] = []
    for number, row in enumerate(schedule):
        rows.append(_check_row(f"schedule[{number}]", row))
        before = rows[-2]["outer_step"] if len(rows) > 1 else 0
        if rows[-1]["outer_step"] <= before:
            raise ValueError(
                f"schedule[{number}]: outer_step={rows[-1]['outer_step']} does not come after "
                f"{before}: put the rows in ascending order, one for each outer step"
            )
    return tuple(rows) or None


def _check_row(where: str, row: object) -> Mapping[str, Any]:
    if not isinstance(row, Mapping) or "outer_step" not in row or len(row) < 2:
        raise ValueError(
            f"{where}={row!r}: write a row with outer_step and any of {', '.join(KEYS)}, such as "
            f"{_FORM}"
        )
    known = ("outer_step", *KEYS)
    for key in row:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            fix = f"did you mean {close[0]}?" if close else f"use {', '.join(KEYS)}"
            raise ValueError(f"{where}: {key} cannot change during a run: {fix}")
    check_integer(f"{where}: outer_step", row["outer_step"], at_least=1)
    if "sync_every" in row:
        check_integer(f"{where}: sync_every", row["sync_every"], at_least=1)
    if "outer_lr" in row:
        check_number(f"{where}: outer_lr", row["outer_lr"], 0.0, math.inf)
    if "outer_momentum" in row:
        check_number(f"{where}: outer_momentum", row["outer_momentum"], 0.0, 1.0, below=True)
    fractions = ("outer_lr", "outer_momentum")
    return {key: float(row[key]) if key in fractions else row[key] for key in known if key in row}


def value_at(rows: Rows | None, key: str, outer_step: int, otherwise: Any) -> Any:
    """Return the value of a key in force for an outer step.

    Args:
        rows: Of ``check_rows``.
        key: One of ``KEYS``.
        outer_step: The number of the step, from 1; a round's length is that of its outer step.
        otherwise: The value before the first row that has the key.
    """
    in_force = (row[key] for row in rows or () if key in row and row["outer_step"] <= outer_step)
    return [otherwise, *in_force][-1]


def check_fits(sync_every: int, num_fragments: int, fragment_sync_delay: int) -> None:
    """Check that every fragment gets its turn in a round, and that its sync ends within the turn.

    One fragment is in flight at a time (torchft ``local_sgd.py``, ``DiLoCo.__init__``).

    Raises:
        ValueError: The rounds cannot be divided among the fragments, or the delay is too long.
    """
    if sync_every % num_fragments:
        below = sync_every - sync_every % num_fragments
        fits = f"{below} or {below + num_fragments}" if below else f"{num_fragments}"
        raise ValueError(
            f"sync_every={sync_every} is not divisible by num_fragments={num_fragments}: use {fits}"
        )
    between = sync_every // num_fragments
    if fragment_sync_delay >= between:
        fits = (p for p in range(num_fragments - 1, 0, -1) if not sync_every % p)
        fewer = next((p for p in fits if fragment_sync_delay < sync_every // p), None)
        others = f", or num_fragments={fewer}" if fewer else ""
        raise ValueError(
            f"fragment_sync_delay={fragment_sync_delay} is not below sync_every / num_fragments = "
            f"{sync_every} / {num_fragments} = {between}, and one fragment is in flight at a time: "
            f"use at most {between - 1}{others}"
        )
