"""The tables of ``bandwidth.py``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

ENOUGH = 0.95
"""The fraction of the time computing that the last table asks for."""

PUBLISHED = {
    "data parallel": (222, 268, 391),
    "vanilla": (23.3, 33.9, 49.4),
    "streaming": (16, 13.3, 11),
    "streaming, overlap": (9.1, 6.2, 5.2),
    "streaming, overlap, FP4": (2.0, 1.4, 1.1),
}
"""Streaming DiLoCo, arXiv 2501.18512, table 4, simulated: Gbit/s for 95 % computing at H = 100,
with 1, 10 and 100 billion parameters."""

Row = dict[str, Any]
Ratios = dict[str, dict[str, float]]


def print_tables(
    console: Console, arguments: argparse.Namespace, rows: list[Row], ratios: Ratios
) -> None:
    """Print all that was measured, and what follows from it."""
    console.print(
        f"2 groups, {arguments.params:,} parameters, batch {arguments.batch}, TCP "
        f"{arguments.tcp_congestion_control}, H={arguments.sync_every}, streaming with "
        f"P={arguments.num_fragments} and tau={arguments.fragment_sync_delay}; median (min, max)"
    )
    names = [link.name for link in arguments.links]
    if names:
        console.print(_links(names, ratios))
        console.print(_rounds([row for row in rows if row["link"] in names], ratios))
    console.print(_overlap(rows, ratios))
    if names:
        console.print(_fewest_steps(names, rows))
    console.print(_published())


def _spread(value: dict[str, float], digits: str = ".3f") -> str:
    return f"{value['median']:{digits}} ({value['min']:.2f}, {value['max']:.2f})"


def _links(names: list[str], ratios: Ratios) -> Table:
    table = Table("link", "reached / set rate", "round trip, ms", title="The links, one plain TCP")
    for name in names:
        table.add_row(
            name,
            f"{ratios[f'{name}: reached / set rate']['median']:.3f}",
            f"{ratios[f'{name}: round trip, ms']['median']:.3g}",
        )
    return table


def _rounds(rows: list[Row], ratios: Ratios) -> Table:
    table = Table(
        "method, wire", "seconds", "computing", "MB", "of float32",
        title="Rounds: time, fraction computing, bytes of a group, beside vanilla float32",
        caption="*: one step, scaled to a round",
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    link = ""
    for row in rows:
        if row["link"] != link:
            link = row["link"]
            table.add_section()
            table.add_row(f"[bold]{link}")
        method = f"{row['method']} {row['wire_format']}"
        key = f"{link}, {method}"
        part = ratios.get(f"{key}: bytes / vanilla float32")
        table.add_row(
            method + ("*" if row["method"] == "DDP" else ""),
            f"{row['round_s']:.2f} ({row['round_s_min']:.2f}, {row['round_s_max']:.2f})",
            _spread(ratios[f"{key}: computing"], ".2f"),
            f"{row['bytes_per_round'] / 1e6:.3g}",
            "" if part is None else f"{part['median']:.3f}",
        )
    return table


def _overlap(rows: list[Row], ratios: Ratios) -> Table:
    table = Table("what", "median (min, max)", title=f"Overlap, over {rows[-1]['link']}")
    for name, value in ratios.items():
        if name.startswith("overlap"):
            table.add_row(name, _spread(value))
    return table


def _fewest_steps(names: list[str], rows: list[Row]) -> Table:
    table = Table(
        "link", "vanilla float32", "streaming float32", "fewest of all rows",
        title=f"Least sync_every (H) and fragments (P) for {ENOUGH:.0%} computing, derived",
        caption="from the time beyond the inner steps, which does not depend on H",
    )  # fmt: skip
    for name in names:
        own = [r for r in rows if r["link"] == name and r["method"] in ("vanilla", "streaming")]
        full = {row["method"]: row for row in own if row["wire_format"] == "float32"}
        best = min(own, key=fewest_steps)
        table.add_row(
            name,
            *(_choice(full[m]) if m in full else "" for m in ("vanilla", "streaming")),
            f"{_choice(best)}, {best['wire_format']}",
        )
    return table


def _choice(row: Row) -> str:
    return f"H={fewest_steps(row)}, P={row['num_fragments']}"


def fewest_steps(row: Row) -> int:
    """The least ``sync_every`` with which enough of the time is spent computing.

    Derived: the time of a round beyond its inner steps is taken to be the same for every
    ``sync_every`` that the fragments and their delay allow.
    """
    beyond = row["sync_every"] * (1 / row["compute_fraction"] - 1)  # in inner steps
    fragments = row["num_fragments"]
    between = max(ENOUGH / (1 - ENOUGH) * beyond / fragments, row["fragment_sync_delay"] + 1)
    return fragments * math.ceil(between)


def _published() -> Table:
    table = Table(
        "Gbit/s for 95 %, H = 100", "1e9", "1e10", "1e11 parameters",
        title="Published: arXiv 2501.18512, table 4, simulated",
    )  # fmt: skip
    for name, values in PUBLISHED.items():
        table.add_row(name, *map(str, values))
    return table
