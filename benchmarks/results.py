"""The command line of a benchmark, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

Spread = dict[str, float]
"""Median, least and most, under ``SPREAD``'s names."""

SPREAD = ("median", "min", "max")


def command_line(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with ``--quick``, which means what ``quick`` says, and ``--json``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return parser


def count(text: str) -> int:
    """A number of parameters, which may be written as 25e6."""
    return int(float(text))


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most."""
    return dict(zip(SPREAD, (statistics.median(values), min(values), max(values)), strict=True))


def report(title: str, rows: Mapping[str, Sequence[float]], arguments: argparse.Namespace) -> None:
    """Print a table of spreads, and write it where ``--json`` says.

    Args:
        title: Of the table.
        rows: What was measured, in every repetition: ratios, or what their names say.
        arguments: The command line's.
    """
    found = {name: spread(values) for name, values in rows.items()}
    table = Table("what", *SPREAD, title=title)
    for name, value in found.items():
        table.add_row(name, *(f"{value[key]:.4g}" for key in SPREAD))
    Console().print(table)
    write({"ratios": found}, arguments)


def write(found: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Write what was measured, and under which arguments, where ``--json`` says."""
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({**found, "arguments": vars(arguments)}, default=str, indent=1)
        )
