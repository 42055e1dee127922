"""The plan of a run, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from composer_replication.diloco.averaging.wire_sizes import WIRE_FORMATS
from composer_replication.plan import (
    Memory,
    PlannedRun,
    check_utilisation,
    ddp_step_seconds,
    memory,
    round_seconds,
    smallest_sync_every,
)
from composer_replication.plan_calibration import Calibration


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """What a method does in a round of ``sync_every`` inner steps.

    Attributes:
        method: ``DDP``, ``vanilla`` or ``streaming``.
        wire_format: What it sends.
        round_s: Seconds of the round.
        utilisation: The share of it that trains.
        bytes_per_round: What leaves each group, in bytes.
        bytes_per_rank: What each of its ranks sends of that.
        smallest_sync_every: Inner steps of the shortest round that trains for the wanted share of
            its time; None where no length does, and for DDP, which has no rounds.
        memory: None for DDP, whose buckets are the gradients.
    """

    method: str
    wire_format: str
    round_s: float
    utilisation: float
    bytes_per_round: float
    bytes_per_rank: float
    smallest_sync_every: int | None = None
    memory: Memory | None = None


class Plan:
    """DDP, vanilla DiLoCo and the run itself, in every wire format that has been measured.

    Args:
        run: The run; its own wire format does not matter.
        calibration: The constants.
        utilisation: The share of the time that should be training.

    Raises:
        ValueError: ``utilisation`` is no such share, or the calibration says nothing of such a run.
    """

    def __init__(self, run: PlannedRun, calibration: Calibration, utilisation: float) -> None:
        check_utilisation(utilisation)
        calibration.check_covers(run)
        self.run, self.calibration, self.utilisation = run, calibration, utilisation
        vanilla = replace(run, num_fragments=1, fragment_sync_delay=0)
        schedules = (vanilla,) if run.is_vanilla else (vanilla, run)
        self.rows = [self._ddp()] if calibration.has_ddp else []
        for schedule in schedules:
            for wire_format in calibration.wire_formats:
                self.rows.append(self._diloco(replace(schedule, wire_format=wire_format)))
        self.notes = list(self._make_notes())

    def _ddp(self) -> PlanRow:
        run = self.run
        step_s = ddp_step_seconds(run, self.calibration.constants)
        num_bytes = run.sync_every * run.ddp_bytes_per_step
        return PlanRow(
            method="DDP",
            wire_format="float32",
            round_s=run.sync_every * step_s,
            utilisation=run.step_s / step_s,
            bytes_per_round=num_bytes,
            bytes_per_rank=num_bytes / run.ranks,
        )

    def _diloco(self, run: PlannedRun) -> PlanRow:
        constants = self.calibration.constants
        round_s = round_seconds(run, constants)
        num_bytes = run.num_fragments * run.bytes_per_sync
        return PlanRow(
            method="vanilla" if run.is_vanilla else "streaming",
            wire_format=run.wire_format,
            round_s=round_s,
            utilisation=run.sync_every * run.step_s / round_s,
            bytes_per_round=num_bytes,
            bytes_per_rank=num_bytes / run.ranks,
            smallest_sync_every=smallest_sync_every(run, constants, self.utilisation),
            memory=memory(run),
        )

    def _make_notes(self) -> Iterator[str]:
        """Where the numbers come from, and which of them nobody has measured."""
        calibration, error = self.calibration, self.calibration.error
        yield (
            f"Calibrated on {calibration.machine}, {calibration.date}, by `{calibration.command}`: "
            f"the model was within {error['max']:.1%} of each of {error['rows']} measured rounds "
            f"(median {error['median']:.1%})."
        )
        outside = calibration.outside(self.run)
        if outside:
            yield f"Extrapolated: {'; '.join(outside)}."
        if calibration.not_told_apart:
            yield (
                "The measured rounds cannot tell these from other constants, which stand for them: "
                f"{', '.join(calibration.not_told_apart)}."
            )
        there = ["DDP"] * calibration.has_ddp + calibration.wire_formats
        missing = [name for name in ("DDP", *WIRE_FORMATS) if name not in there]
        if missing:
            yield f"Not in the calibration, so not in the tables: {', '.join(missing)}."
        if any(row.memory and row.smallest_sync_every is None for row in self.rows):
            yield "Never: each sync keeps training waiting, however long the round. Ask for less."
        yield (
            "Time: forming, coding and the outer step take what they took on the calibration's "
            "machine; an accelerator or another processor takes another time. Groups are equal, "
            "fragments too, and the ranks of a group share its link. What a longer round, a delay "
            "or a wire format costs in loss is not in the tables."
        )
        yield (
            "Memory: by the code, of each process, so of every rank under DDP. The host's has been "
            "measured for float32 on CPUs, the device's never. Groups that average over gloo need "
            "none there."
        )

    def print(self, console: Console) -> None:
        """Print two tables and the notes."""
        run = self.run
        streaming = (
            f"; streaming: {run.num_fragments} fragments, each overlapped with "
            f"{run.fragment_sync_delay} inner steps"
        )
        console.print(
            f"{run.params:,} parameters in {run.groups} replica groups, {run.step_s:g} s an inner "
            f"step; {run.link_bits_per_s / 1e9:,g} Gbit/s and {run.round_trip_s:g} s of round trip "
            f"between groups{'' if run.is_vanilla else streaming}.",
            highlight=False,
        )
        console.print(self._times())
        console.print(self._memory())
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def _times(self) -> Table:
        is_shared = self.run.ranks > 1
        by_rank = ("by a rank",) if is_shared else ()
        shortest = f"H for {100 * self.utilisation:.4g} %"
        table = _table(
            f"A round of {self.run.sync_every} inner steps (H)",
            ("round, s", "training", "sent by a group", *by_rank, shortest),
        )
        for row in self.rows:
            h = "never" if row.smallest_sync_every is None else f"{row.smallest_sync_every:,}"
            table.add_row(
                row.method,
                row.wire_format,
                f"{row.round_s:,.1f}",
                f"{row.utilisation:.1%}",
                decimal(round(row.bytes_per_round)),
                *([decimal(round(row.bytes_per_rank))] if is_shared else []),
                h if row.memory else "-",
            )
        return table

    def _memory(self) -> Table:
        table = _table(
            "Memory of a process, beyond the model",
            ("host, resting", "host, in a sync", "device, over NCCL"),
        )
        for row in self.rows:
            if row.memory:
                sizes = (decimal(round(value)) for value in asdict(row.memory).values())
                table.add_row(row.method, row.wire_format, *sizes)
        return table

    def as_json(self) -> dict[str, Any]:
        """All of it, in seconds, bytes and bits per second."""
        run = asdict(self.run)
        del run["wire_format"]
        return {
            "run": run,
            "utilisation": self.utilisation,
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
            "calibration": asdict(self.calibration),
        }


def _table(title: str, numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("method", "wire format"):
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
