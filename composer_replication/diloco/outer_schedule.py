"""A schedule of the outer settings: with which numbers each outer step is taken.

It is a step function of the outer step, which is the same in all replica groups. So it needs no
message: a group that resumes, or that joins late, knows its row from the outer step alone. Imports
no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from composer_replication.diloco.checks import check_integer, check_number

MAX_ROWS = 64
"""Groups compare the whole schedule when they start, in a message of a fixed size."""

_ROW = "[outer_step, outer_lr, outer_momentum]"


def check_outer_schedule(schedule: object) -> list[list[float]] | None:
    """Check a schedule.

    Args:
        schedule: Rows ``[outer_step, outer_lr, outer_momentum]``, or None.

    Returns:
        The rows as lists of an integer and two floats; None if there are none.

    Raises:
        ValueError: It is no list of such rows, a number is out of range, or the outer steps do not
            ascend.
    """
    if schedule is None:
        return None
    if not _is_list(schedule):
        raise ValueError(f"outer_schedule={schedule!r}: give a list of rows {_ROW}, or null")
    if len(schedule) > MAX_ROWS:
        raise ValueError(f"outer_schedule has {len(schedule)} rows: use at most {MAX_ROWS}")
    rows: list[list[float]] = []
    for number, row in enumerate(schedule):
        where = f"outer_schedule[{number}]"
        if not _is_list(row) or len(row) != 3:
            raise ValueError(f"{where}={row!r}: write a row {_ROW}")
        step, lr, momentum = row
        check_integer(f"{where}: outer_step", step, at_least=1)
        check_number(f"{where}: outer_lr", lr, 0.0, math.inf)
        check_number(f"{where}: outer_momentum", momentum, 0.0, 1.0, below=True)
        if rows and step <= rows[-1][0]:
            raise ValueError(
                f"{where}: outer_step={step} does not come after {rows[-1][0]}: put the rows in "
                "ascending order, with one row for each outer step"
            )
        rows.append([step, float(lr), float(momentum)])
    return rows or None


def row_at(rows: Sequence[Sequence[Any]], outer_step: int) -> Sequence[Any]:
    """Return the row that an outer step is taken with.

    Args:
        rows: Those of a fingerprint, from row 0 on.
        outer_step: The number of the step, from 1.
    """
    return next(row for row in reversed(rows) if row[0] <= outer_step)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
