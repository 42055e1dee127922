"""The command line of a benchmark, and what it prints and writes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import psutil
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
    """Write what was measured, with which arguments, when and where, to the file of ``--json``.

    It says nothing of where it was written. The pages take their numbers from such files in
    ``benchmarks/measured``.
    """
    if arguments.json is not None:
        own = {name: value for name, value in vars(arguments).items() if name != "json"}
        about = {"arguments": own, "measured": circumstances()}
        arguments.json.write_text(json.dumps({**found, **about}, default=str, indent=1) + "\n")


def circumstances() -> dict[str, object]:
    """The command of this process, today, the state of the repository, and this machine."""
    words = sys.orig_argv[1:]
    if "--json" in words:  # and its value
        at = words.index("--json")
        del words[at : at + 2]
    state = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    commit = subprocess.run(state, cwd=folder, capture_output=True, text=True, check=False)
    torch = sys.modules.get("torch")
    return {
        "command": shlex.join(["python", *words]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None,
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Its name; Linux has it in a file only."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor())
