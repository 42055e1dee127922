"""The results files of the studies: one line for each training, in JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cells import Cell

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
DEFAULTS = HERE / "defaults.jsonl"
WARM = HERE / "warm.jsonl"
PICTURES = HERE / "pictures.jsonl"

Lines = Mapping[str, Mapping[str, Any]]


def read(path: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The results by the cell's key. A line that was cut off is said on stderr, and left out."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            print(
                f"{path.name}:{number} was cut off: that training counts as not made",
                file=sys.stderr,
            )
            continue
        found[Cell(**result["cell"]).key] = result
    return found


def read_all() -> Lines:
    """The results of the first two studies. They have some trainings in common."""
    return {**read(DEFAULTS), **read(RESULTS)}


def append(path: Path, result: Mapping[str, Any]) -> None:
    """Add a line, which begins a line of its own even if a killed worker left half a one."""
    with path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        begin = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(begin + json.dumps(result).encode() + b"\n")
        os.fsync(file.fileno())
