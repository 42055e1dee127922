"""Fit the constants of ``composer-replication plan`` to what benchmarks/bandwidth.py measured.

    python benchmarks/bandwidth.py --json TABLE.json
    python benchmarks/calibrate.py TABLE.json --machine "2 cores (...), gloo over shaped loopback"

Least squares of the relative error of each round's seconds, no constant below 0; the model is that
of ``composer_replication.plan``. The error of every row is printed, and the constants are written
where the command finds them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import numpy as np
from measured_rounds import SYNCING, Row, errors_of, read_rows
from nonnegative import fit_nonnegative
from rich.console import Console
from rich.table import Table

from composer_replication.plan import (
    BYTES_PER_PARAMETER,
    DDP_OVERLAP,
    Terms,
    ddp_terms,
    host_terms,
    seconds,
    send_terms,
)
from composer_replication.plan_calibration import SHIPPED, Calibration, measured_ranges

LEAST = {"link_time": 1.0, "ddp_link_time": 1.0}
"""No line carries more than its rate."""

MOST = {"round_trips_per_message": 1.0, "ddp_round_trips_per_message": 1.0}
"""Each of a ring's 2 (k - 1) hops goes one way. What else round trips cost is a sync's, not a
message's, of which a large model has hundreds."""

ROUNDS_OF_FITTING = 20
"""Which syncs are hidden depends on the constants, and these on which are: so often in turn."""

NAMES = (
    "link_time",
    *(f"host_s_per_param.{name}" for name in BYTES_PER_PARAMETER),
    *(f"send_s_per_param.{name}" for name in BYTES_PER_PARAMETER),
    "round_trips_per_message",
    "round_trips_per_sync",
    "sync_s",
    "ddp_link_time",
    "ddp_s_per_param",
    "ddp_round_trips_per_message",
)
"""What cannot be told apart counts as the first: as what grows with the model and nothing hides, so
that for a larger model a plan is rather too long than too short."""

OVERLAPS = np.linspace(0.0, 1.0, 101)

CLOSE = 0.1
"""Overlaps that are as good may differ by so much before none of them counts as known."""


def fit(rows: Sequence[Row]) -> tuple[dict[str, float], list[str]]:
    """The constants, and the names of those that the rows could not tell from others."""
    constants, together = fit_syncs([r for r in rows if r.method in SYNCING])
    ddp, ddp_together = fit_ddp([r for r in rows if r.method == "DDP"])
    return constants | ddp, together + ddp_together


def fit_syncs(rows: Sequence[Row]) -> tuple[dict[str, float], list[str]]:
    """Fit what a sync takes, beginning with the rows in which nothing is hidden."""

    def is_late(row: Row, constants: dict[str, float]) -> bool:
        hidden = row.run.fragment_sync_delay * row.run.step_s
        return not hidden or seconds(send_terms(row.run), constants) > hidden

    def equation(row: Row, is_late: bool) -> tuple[Terms, float]:
        run = row.run
        terms = host_terms(run) | (send_terms(run) if is_late else {})
        hidden = run.num_fragments * run.fragment_sync_delay * run.step_s * is_late
        target = row.round_s - run.sync_every * run.step_s + hidden
        return {name: run.num_fragments * value for name, value in terms.items()}, target

    open_rows = [row for row in rows if not row.run.fragment_sync_delay]
    return _in_turns(rows, open_rows, is_late, equation)


def fit_ddp(rows: Sequence[Row]) -> tuple[dict[str, float], list[str]]:
    """Fit what a step of DDP takes, with the least overlap that explains it as well as any."""
    if not rows:
        return {}, []

    def with_overlap(overlap: float) -> tuple[dict[str, float], list[str]]:
        def is_late(row: Row, constants: dict[str, float]) -> bool:
            return seconds(ddp_terms(row.run), constants) > overlap * row.run.step_s

        def equation(row: Row, is_late: bool) -> tuple[Terms, float]:
            terms = ddp_terms(row.run) if is_late else {}
            waiting = row.round_s / row.run.sync_every - row.run.step_s
            return (
                {name: row.run.sync_every * value for name, value in terms.items()},
                row.run.sync_every * (waiting + overlap * row.run.step_s * is_late),
            )

        constants, together = _in_turns(rows, rows, is_late, equation)
        return constants | {DDP_OVERLAP: overlap}, together

    fits = [with_overlap(float(overlap)) for overlap in OVERLAPS]
    squares = [sum(e * e for e in errors_of(rows, constants)) for constants, _ in fits]
    best = 1.01 * min(squares) + 1e-12
    as_good = [found for found, error in zip(fits, squares, strict=True) if error <= best]
    constants, together = as_good[0]
    spread = as_good[-1][0][DDP_OVERLAP] - constants[DDP_OVERLAP]
    return constants, together + [DDP_OVERLAP] * (spread > CLOSE)


def _in_turns(
    rows: Sequence[Row],
    first: Sequence[Row],
    is_late: Callable[[Row, dict[str, float]], bool],
    equation: Callable[[Row, bool], tuple[Terms, float]],
) -> tuple[dict[str, float], list[str]]:
    """Fit, look which rows wait for their sync, fit again; the best of all that were met."""
    found = _solve(first or rows, [True] * len(first or rows), equation)
    best: tuple[float, dict[str, float], list[str]] = (math.inf, *found)
    for _ in range(ROUNDS_OF_FITTING):
        late = [is_late(row, found[0]) for row in rows]
        found = _solve(rows, late, equation)
        error = sum(e * e for e in errors_of(rows, found[0]))
        if error >= best[0]:
            break
        best = (error, *found)
    return best[1], best[2]


def _solve(
    rows: Sequence[Row], late: Sequence[bool], equation: Callable[[Row, bool], tuple[Terms, float]]
) -> tuple[dict[str, float], list[str]]:
    equations = [equation(row, is_late) for row, is_late in zip(rows, late, strict=True)]

    known = {name for terms, _ in equations for name in terms}
    weights = [1 / row.round_s for row in rows]

    def solve(most: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        """With some constants at their most, and the others above their least."""
        given = {name: value for name, value in (LEAST | most).items() if name in known}
        free = [{n: v for n, v in terms.items() if n not in most} for terms, _ in equations]
        targets = [
            target - sum(given.get(name, 0.0) * value for name, value in terms.items())
            for terms, target in equations
        ]
        found, together = fit_nonnegative(NAMES, free, targets, weights)
        return given | {n: v + given.get(n, 0.0) for n, v in found.items()}, together

    constants, together = solve({})
    too_much = {name: most for name, most in MOST.items() if constants.get(name, 0.0) > most}
    return solve(too_much) if too_much else (constants, together)


def spread_of(rows: Sequence[Row], errors: Sequence[float]) -> dict[str, float]:
    """Median and greatest of the relative errors, and of how many rows that send something."""
    sizes = [abs(e) for row, e in zip(rows, errors, strict=True) if row.method != "none"]
    return {"median": statistics.median(sizes), "max": max(sizes), "rows": len(sizes)}


def print_fit(rows: Sequence[Row], errors: Sequence[float], found: Calibration) -> None:
    """Print every row with its error, and the constants."""
    table = Table(*("method wire H P tau".split()), "link, Gbit/s", "round trip, s", title="Rounds")
    for name in ("measured, s", "model, s", "error"):
        table.add_column(name, justify="right")
    for row, error in zip(rows, errors, strict=True):
        run = row.run
        shape = (run.sync_every, run.num_fragments, run.fragment_sync_delay)
        line = (f"{run.link_bits_per_s / 1e9:g}", f"{run.round_trip_s:g}")
        times = (f"{row.round_s:.4g}", f"{row.round_s * (1 + error):.4g}", f"{error:+.1%}")
        table.add_row(row.method, run.wire_format, *map(str, shape), *line, *times)
    constants = Table("constant", "value", title="Constants")
    for name, value in found.constants.items():
        constants.add_row(name, f"{value:.4g}")
    console = Console()
    console.print(table)
    console.print(constants)
    if found.not_told_apart:
        console.print(f"Not told from other constants: {', '.join(found.not_told_apart)}.")
    spread = found.error
    console.print(
        f"The model's error in {spread['rows']} rounds: median {spread['median']:.1%}, "
        f"at most {spread['max']:.1%}."
    )


def main() -> None:
    """Fit, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, help="what bandwidth.py --json wrote")
    parser.add_argument("--machine", required=True, help="what it was measured on, in words")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where to write the constants")
    arguments = parser.parse_args()
    try:
        rows = read_rows(json.loads(arguments.table.read_text()))
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.table}: {error}")
    constants, not_told_apart = fit(rows)
    errors = errors_of(rows, constants)
    found = Calibration(
        constants=constants,
        not_told_apart=not_told_apart,
        error=spread_of(rows, errors),
        measured=measured_ranges([row.run for row in rows if row.method in SYNCING]),
        date=date.today().isoformat(),
        machine=arguments.machine,
        command=f"python benchmarks/calibrate.py {arguments.table.name}",
    )
    print_fit(rows, errors, found)
    found.save(arguments.out)


if __name__ == "__main__":
    main()
