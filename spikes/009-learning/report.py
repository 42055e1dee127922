"""Writes the table and pictures of ``docs/learning.md``, ``claims.md`` and ``tried.md``.

    python spikes/009-learning/report.py

All of it is from ``results.jsonl``, ``defaults.jsonl``, ``warm.jsonl`` and ``picture.jsonl``. What
stands between the markers in a document is replaced; the rest is prose, and stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import picture
import warm
from arms import ARMS, CURVES, DATA_PARALLEL_MUON, SENT, SHOWN, Arm
from cells import CLAIM_SEEDS, EARLY_STEPS, TUNING_SEEDS, Cell
from lines import WARM, read, read_all
from paired import Difference, compare

from composer_replication.diloco.averaging.wire_sizes import BYTES_PER_PARAMETER

DOCUMENT = Path(__file__).parents[2] / "docs" / "learning.md"
CLAIMS = Path(__file__).parent / "claims.md"
TRIED = Path(__file__).parent / "tried.md"
BEGIN, END = "<!-- {name}: written by spikes/009-learning/report.py -->", "<!-- end of {name} -->"


class Results:
    """The trainings that have been made, by cell."""

    def __init__(self, lines: Mapping[str, Mapping[str, Any]]) -> None:
        self.lines = lines

    def bits(self, cell: Cell, seeds: Iterable[int] = CLAIM_SEEDS) -> dict[int, float]:
        """Held-out bits per byte by seed."""
        found = {seed: self.lines.get(cell.with_seed(seed).key) for seed in seeds}
        return {seed: line["bits"] for seed, line in found.items() if line is not None}

    def curve(self, cell: Cell, seeds: Iterable[int] = CLAIM_SEEDS) -> list[float]:
        """The training loss in bits per byte along the run, as a mean over the seeds."""
        lines = [self.lines.get(cell.with_seed(seed).key) for seed in seeds]
        curves = [line["loss"] for line in lines if line is not None]
        return [statistics.fmean(values) / 0.693147 for values in zip(*curves, strict=True)]

    def above(self, arm: Arm) -> Difference | None:
        """How far an arm lies above what it is compared with."""
        return compare(self.bits(arm.cell), self.bits(arm.base))


def claims(results: Results) -> str:
    """The table of all arms."""
    return _table(results, ARMS, "inner lr | outer lr, momentum | ")


def shown(results: Results) -> str:
    """The table of the arms that a user chooses by, with less of their settings."""
    return _table(results, [arm for arm in ARMS if arm.name in SHOWN], "")


def _table(results: Results, arms: Iterable[Arm], settings: str) -> str:
    last = "seeds | median, bits per byte | against | difference, 90 % interval |"
    head = f"| arm | {settings}{last}"
    rows = [head, "|---" * (head.count("|") - 1) + "|"]
    for arm in arms:
        bits = results.bits(arm.cell)
        above = results.above(arm) if arm.base != arm.cell else None
        if not bits:
            continue
        outer = f"{arm.cell.outer_lr:g}, {arm.cell.outer_momentum:g}" if arm.cell.groups else "-"
        rows.append(
            f"| {arm.name} | {f'{arm.cell.lr:g} | {outer} | ' if settings else ''}{len(bits)} | "
            f"{statistics.median(bits.values()):.3f} | {arm.against} | {above or '-'} |"
        )
    return "\n".join(rows) if len(rows) > 2 else "None of the arms has been trained yet."


def tuning(results: Results) -> str:
    """The table of all settings that were tried on the tuning seeds."""
    rows = [
        "| groups | H | steps | batch | inner | inner lr | merge | outer lr | momentum | seeds "
        "| bits per byte |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    tried: dict[Cell, dict[int, float]] = {}
    for line in read_all().values():
        cell = Cell(**line["cell"])
        if cell.seed in TUNING_SEEDS:
            tried.setdefault(replace(cell, seed=0), {})[cell.seed] = line["bits"]
    for cell, bits in sorted(tried.items(), key=lambda each: _order(each[0])):
        outer = (_rounds(cell), cell.merge, cell.outer_lr, cell.outer_momentum)
        h, merge, lr, momentum = outer if cell.groups else ("-", "-", "-", "-")
        groups = cell.groups or "data parallel"
        rows.append(
            f"| {groups} | {h} | {cell.steps} | {cell.batch} | {_inner(cell)} | {cell.lr:g} "
            f"| {merge} | {lr} | {momentum} | {len(bits)} | {statistics.fmean(bits.values()):.3f} |"
        )
    return "\n".join(rows)


def _rounds(cell: Cell) -> str:
    early = f"{cell.early} for {EARLY_STEPS} steps, then " if cell.early else ""
    return f"{early}{cell.sync_every}"


def _inner(cell: Cell) -> str:
    usual = Cell()
    parts = [cell.inner]
    for name in ("momentum", "beta2"):
        if (value := getattr(cell, name)) != getattr(usual, name):
            parts.append(f"{name} {value:g}")
    return ", ".join(parts)


def _order(cell: Cell) -> tuple[Any, ...]:
    kind = cell.steps, cell.batch, cell.groups, cell.sync_every, cell.inner
    return (*kind, cell.lr, cell.outer_lr)


def gained(results: Results) -> str:
    """The table of what ships beside one group alone."""
    return warm.gains(warm.Known(read(WARM), results.lines))


def with_tables(document: Path, results: Results) -> str:
    """Return the text of one of the documents with its tables as the results have them."""
    tables = {
        DOCUMENT: {"gains": gained, "arms": shown},
        CLAIMS: {"claims": claims},
        TRIED: {"tuning": tuning},
    }
    text = document.read_text()
    for name, table in tables[document].items():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        head, _, rest = text.partition(begin)
        if end not in rest:
            raise ValueError(f"{document} has no place for {name}: write {begin} and {end} into it")
        text = f"{head}{begin}\n\n{table(results)}\n\n{end}{rest.partition(end)[2]}"
    return text


PARAMS = 443648
"""Of the study's model."""


def bytes_sent(cell: Cell, groups: int) -> float:
    """Bytes that each group sends in a whole training, with a ring allreduce over so many groups.

    Args:
        cell: The training. Data parallel, which has no groups, sends every gradient in float32.
        groups: Between which the bytes go.
    """
    early = EARLY_STEPS if cell.early else 0
    syncs = early / (cell.early or 1) + (cell.steps - early) / cell.sync_every
    each = BYTES_PER_PARAMETER[cell.wire_format] * syncs if cell.groups else 4 * cell.steps
    return 2 * (groups - 1) / groups * PARAMS * each


def draw_bytes(results: Results, folder: Path) -> None:
    """Draw held-out loss against bytes sent: docs/learning.md."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    base, colors = DATA_PARALLEL_MUON, {2: "C0", 4: "C1", 8: "C3"}
    sent = [bytes_sent(base, groups) for groups in colors]
    axes.plot(sent, [0] * len(sent), "s-", color="0.3", label="data parallel of 2, 4, 8 groups")
    for groups, trainings in SENT.items():
        points = {}
        for name, cell in trainings.items():
            above = compare(results.bits(cell), results.bits(base))
            if above is not None:
                points[name] = (bytes_sent(cell, groups), above)
        xs, gaps = zip(*points.values(), strict=True)
        color = colors[groups]
        axes.plot(xs, [gap.mean for gap in gaps], "o", color=color, label=f"{groups} groups")
        for place, (name, (x, gap)) in enumerate(points.items()):
            if gap.seeds > 2:  # of two the interval says nothing
                axes.vlines(x, gap.low, gap.high, color=color, alpha=0.5)
            label = f"{name} ({gap.seeds})"
            shift = (5, 4 if place % 2 == 0 else -11)  # beside each other, not over each other
            axes.annotate(label, (x, gap.mean), shift, textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(1e7, 1e10)
    axes.set_ylim(-0.7, 13.5)
    axes.set_xlabel("bytes that each group sends in the whole training")
    bits = statistics.median(results.bits(base).values())
    axes.set_ylabel(f"held-out loss above data parallel, %\n(0: {bits:.3f} bits per byte)")
    axes.set_xticks([1e7, 1e8, 1e9, 1e10], ["10 MB", "100 MB", "1 GB", "10 GB"])
    axes.legend(fontsize=8)
    figure.savefig(folder / "loss-against-bytes.png", dpi=110)


def draw_curves(results: Results, folder: Path) -> None:
    """Draw the training loss of a healthy and of a sick outer loop: docs/outer-settings.md."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    for name, cell in CURVES.items():
        curve = results.curve(cell, TUNING_SEEDS[:1])
        steps = [(index + 1) / len(curve) * cell.steps for index in range(len(curve))]
        axes.plot(steps, curve, label=name, linewidth=1.4)
    axes.set(xlabel="inner steps", ylabel="training loss, bits per byte", ylim=(1.5, 4.2))
    axes.legend(fontsize=9)
    figure.savefig(folder / "outer-loop.png", dpi=110)


def main() -> None:
    results = Results(read_all())
    for document in (DOCUMENT, CLAIMS, TRIED):
        document.write_text(with_tables(document, results))
    if any(results.bits(arm.cell) for arm in ARMS):
        picture.draw(read(picture.LINES), picture.PICTURE)
        draw_bytes(results, DOCUMENT.parent)
        draw_curves(results, DOCUMENT.parent)
    print(claims(results))


if __name__ == "__main__":
    main()
