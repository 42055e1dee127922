"""The measured constants behind a plan, and how far a planned run is from what was measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER
from composer_replication.plan import CONSTANTS, DDP_OVERLAP, PlannedRun

SHIPPED = Path(__file__).with_name("plan_calibration.json")

HOW_TO_MAKE_ONE = (
    "`python benchmarks/bandwidth.py --json TABLE.json` and then "
    "`python benchmarks/calibrate.py TABLE.json --machine WORDS`"
)

RANGES = {
    "params": "parameters",
    "groups": "replica groups",
    "link_bits_per_s": "bit/s of the link",
    "round_trip_s": "s of round trip",
    "num_fragments": "fragments",
}
"""What a planned run is compared in with the measured ones, in words. Whatever a step takes is the
planner's to say."""

_RATE = re.compile(r"([\d.]+(?:e\d+)?)\s*([kMGT]?)(bit|b|B)(?:/s|ps)?")
_PREFIX = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What ``benchmarks/calibrate.py`` found.

    Args:
        constants: Those of ``composer_replication.plan``, by the names of its terms.
        not_told_apart: Constants that the measured rounds could not tell from others, which stand
            for them.
        error: Of the model against the measured rounds: ``median`` and ``max`` of the relative
            errors, and ``rows``, how many there were.
        measured: The least and the greatest of each of ``RANGES``, and the ``wire_formats``.
        date: When it was made.
        machine: On what, in words.
        command: How.
    """

    constants: dict[str, float]
    not_told_apart: list[str]
    error: dict[str, float]
    measured: dict[str, list[Any]]
    date: str
    machine: str
    command: str

    @classmethod
    def load(cls, path: Path | None = None) -> Calibration:
        """Read one; without a path that which is shipped with the package.

        Raises:
            FileNotFoundError: It is not there.
            ValueError: It is no calibration.
        """
        path = path or SHIPPED
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no calibration at {path}: make one with {HOW_TO_MAKE_ONE}, or give "
                "another with --calibration FILE"
            )
        names = {field.name for field in fields(cls)}
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: make it with {HOW_TO_MAKE_ONE}") from error
        if not isinstance(found, dict) or found.keys() != names:
            keys = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise ValueError(
                f"{path} has {keys} and not {sorted(names)}: make it with {HOW_TO_MAKE_ONE}"
            )
        constants = found["constants"]
        if not isinstance(constants, dict) or constants.keys() - set(CONSTANTS):
            given = sorted(constants) if isinstance(constants, dict) else constants
            raise ValueError(
                f"{path} has the constants of another model, {given} and not {sorted(CONSTANTS)}: "
                f"make it with {HOW_TO_MAKE_ONE}"
            )
        return cls(**found)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @property
    def wire_formats(self) -> list[str]:
        """Those that were measured, in the order of their size."""
        return [name for name in BYTES_PER_PARAMETER if name in self.measured["wire_formats"]]

    @property
    def has_ddp(self) -> bool:
        """Whether DDP was measured."""
        return DDP_OVERLAP in self.constants

    def check_covers(self, run: PlannedRun) -> None:
        """Refuse what no measured round says anything about.

        Raises:
            ValueError: The run has a round trip, and no measured round had one.
        """
        if run.round_trip_s and not self.measured["round_trip_s"][1]:
            raise ValueError(
                f"round_trip={run.round_trip_s}: the calibration has no round with a round trip, "
                f"so what one costs is not known: leave it out, or make one with {HOW_TO_MAKE_ONE}"
            )

    def outside(self, run: PlannedRun) -> list[str]:
        """In what the run lies outside of what was measured, a phrase each."""
        found = []
        for name, words in RANGES.items():
            least, greatest = self.measured[name]
            value = getattr(run, name)
            if not least <= value <= greatest:
                ends = [f"{end:,.10g}" for end in sorted({least, greatest})]
                found.append(f"{value:,.10g} {words} (measured: {' to '.join(ends)})")
        return found


def parse_link(text: str) -> float:
    """Read a rate such as ``10Gbit``, ``100Mbit``, ``1Gb/s`` or ``250MB/s`` (bytes).

    Returns:
        Bits per second; the prefixes are powers of 1000, as networks have them.

    Raises:
        ValueError: It is none.
    """
    match = _RATE.fullmatch(text.strip())
    try:
        value = float(match[1]) * _PREFIX[match[2]] * (8 if match[3] == "B" else 1) if match else 0
    except ValueError:
        value = 0  # such as 1.2.3
    if not 0 < value < math.inf:
        raise ValueError(
            f"link={text!r}: write a rate such as 1Gbit, 100Mbit or 1Gb/s, or in bytes 250MB/s"
        )
    return value


def measured_ranges(runs: Sequence[PlannedRun]) -> dict[str, list[Any]]:
    """For ``Calibration.measured``: of what runs rounds were measured."""
    ranges: dict[str, list[Any]] = {}
    for name in RANGES:
        values = [getattr(run, name) for run in runs]
        ranges[name] = [min(values), max(values)]
    return ranges | {"wire_formats": sorted({run.wire_format for run in runs})}
