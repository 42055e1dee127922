"""Fit the constants of ``composer-replication plan`` to what benchmarks/bandwidth.py measured.

    python benchmarks/bandwidth.py --json TABLE.json
    python benchmarks/calibrate.py TABLE.json --machine "2 cores (...), gloo over shaped loopback"

Least squares of the relative error of each round's seconds, no constant below 0; the model is that
of ``composer_replication.plan``. The error of every row is printed, and the constants are written
where the command finds them. ``--held-out TABLE`` says how far they are from another run's rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

import numpy as np
from measured_rounds import SYNCING, Row, errors_of, read_rows
from nonnegative import fit_nonnegative
from rich.console import Console
from rich.table import Table

from composer_replication.plan import (
    CONSTANTS,
    DDP_OVERLAP,
    OVERLAP_COST,
    Terms,
    ddp_terms,
    host_terms,
    seconds,
    send_terms,
)
from composer_replication.plan_calibration import SHIPPED, Calibration, measured_ranges

LEAST = {"link_time": 1.0, "ddp_link_time": 1.0}
"""No line carries more than its rate."""

MOST = {"round_trips_per_mib": 1.0, "ddp_round_trips_per_mib": 1.0}
"""No MiB waits for more than its acknowledgement. What else round trips cost is a sync's: a large
model sends thousands of MiB."""

ROUNDS_OF_FITTING = 20
"""Which syncs are hidden depends on the constants, and these on which are: so often in turn."""

SHARES = np.linspace(0.0, 1.0, 101)
"""Of what is overlapped: tried one by one, since the others would no longer be linear."""

CLOSE = 0.1
"""Shares that are as good may differ by so much before none of them counts as known."""

Fitted = tuple[dict[str, float], list[str]]
"""Constants, and the names of those that could not be told from others."""


def fit(rows: Sequence[Row]) -> Fitted:
    """All constants."""
    constants, together = fit_syncs([r for r in rows if r.method in SYNCING])
    ddp, ddp_together = fit_ddp([r for r in rows if r.method == "DDP"])
    return constants | ddp, together + ddp_together


def fit_syncs(rows: Sequence[Row]) -> Fitted:
    """Fit what a sync takes, beginning with the rows in which nothing is hidden."""
    open_rows = [row for row in rows if not row.run.fragment_sync_delay]

    def is_late(row: Row, constants: Mapping[str, float]) -> bool:
        hidden = row.run.fragment_sync_delay * row.run.step_s
        return not hidden or seconds(send_terms(row.run), constants) > hidden

    def with_cost(cost: float) -> Fitted:
        def equation(row: Row, is_late: bool) -> tuple[Terms, float]:
            run, share = row.run, 1.0 if is_late else cost
            send = {name: share * value for name, value in send_terms(run).items()}
            hidden = (1 - cost) * run.fragment_sync_delay * run.step_s * is_late
            terms = {n: run.num_fragments * v for n, v in (host_terms(run) | send).items()}
            return terms, row.round_s - run.sync_every * run.step_s + run.num_fragments * hidden

        return _in_turns(rows, open_rows, is_late, equation, {OVERLAP_COST: cost})

    return _with_best_share(rows, OVERLAP_COST, with_cost)


def fit_ddp(rows: Sequence[Row]) -> Fitted:
    """Fit what a step of DDP takes."""

    def with_overlap(overlap: float) -> Fitted:
        def is_late(row: Row, constants: Mapping[str, float]) -> bool:
            return seconds(ddp_terms(row.run), constants) > overlap * row.run.step_s

        def equation(row: Row, is_late: bool) -> tuple[Terms, float]:
            terms = ddp_terms(row.run) if is_late else {}
            waiting = row.round_s / row.run.sync_every - row.run.step_s
            return (
                {name: row.run.sync_every * value for name, value in terms.items()},
                row.run.sync_every * (waiting + overlap * row.run.step_s * is_late),
            )

        return _in_turns(rows, rows, is_late, equation, {DDP_OVERLAP: overlap})

    return _with_best_share(rows, DDP_OVERLAP, with_overlap) if rows else ({}, [])


def _with_best_share(rows: Sequence[Row], name: str, fit_with: Callable[[float], Fitted]) -> Fitted:
    """The fit with the least share that explains the rows as well as any."""
    fits = [fit_with(float(share)) for share in SHARES]
    squares = [_squares(rows, constants) for constants, _ in fits]
    best = 1.01 * min(squares) + 1e-12
    as_good = [found for found, error in zip(fits, squares, strict=True) if error <= best]
    constants, together = as_good[0]
    spread = as_good[-1][0][name] - constants[name]
    return constants, together + [name] * (spread > CLOSE)


def _squares(rows: Sequence[Row], constants: Mapping[str, float]) -> float:
    return sum(error * error for error in errors_of(rows, constants))


def _in_turns(
    rows: Sequence[Row],
    first: Sequence[Row],
    is_late: Callable[[Row, Mapping[str, float]], bool],
    equation: Callable[[Row, bool], tuple[Terms, float]],
    given: dict[str, float],
) -> Fitted:
    """Fit, look which rows wait for their sync, fit again; the best of all that were met."""
    constants, together = _solve(first or rows, [True] * len(first or rows), equation)
    best, best_error = (constants | given, together), math.inf
    for _ in range(ROUNDS_OF_FITTING):
        late = [is_late(row, constants) for row in rows]
        constants, together = _solve(rows, late, equation)
        error = _squares(rows, constants | given)
        if error >= best_error:
            break
        best, best_error = (constants | given, together), error
    return best


def _solve(
    rows: Sequence[Row], late: Sequence[bool], equation: Callable[[Row, bool], tuple[Terms, float]]
) -> Fitted:
    equations = [equation(row, is_late) for row, is_late in zip(rows, late, strict=True)]

    known = {name for terms, _ in equations for name in terms}
    weights = [1 / row.round_s for row in rows]

    def solve(most: dict[str, float]) -> Fitted:
        """With some constants at their most, and the others above their least."""
        given = {name: value for name, value in (LEAST | most).items() if name in known}
        free = [{n: v for n, v in terms.items() if n not in most} for terms, _ in equations]
        targets = [
            target - sum(given.get(name, 0.0) * value for name, value in terms.items())
            for terms, target in equations
        ]
        found, together = fit_nonnegative(CONSTANTS, free, targets, weights)
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
    parser.add_argument("--held-out", type=Path, metavar="TABLE", help="of another run")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="where to write the constants")
    arguments = parser.parse_args()
    rows, held_out = (_read(path, parser) for path in (arguments.table, arguments.held_out))
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
    if held_out:
        spread = spread_of(held_out, errors_of(held_out, constants))
        print(
            f"In {spread['rows']} rounds of {arguments.held_out}, which nothing was fitted to: "
            f"median {spread['median']:.1%}, at most {spread['max']:.1%}."
        )


def _read(path: Path | None, parser: argparse.ArgumentParser) -> list[Row]:
    if path is None:
        return []
    try:
        return read_rows(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        parser.error(f"{path}: {error}")


if __name__ == "__main__":
    main()
