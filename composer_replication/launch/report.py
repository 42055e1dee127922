"""Draws ``loss.png`` from what a run wrote into its folder."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from composer_replication.callback.run_folder import EVENTS
from composer_replication.callback.words import plural
from composer_replication.launch.run_record import Run, read_run
from composer_replication.launch.thin_out import thin_out

PICTURE = "loss.png"

# Okabe and Ito's colours, told apart by colour-blind people; the yellow is too pale for a line.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")

MAX_POINTS = 4000
"""Most syncs of a group that are drawn. Of a longer run, evenly spaced ones are drawn."""

_DIRECTIONS = {
    "diloco/group_cosine": "between groups",
    "diloco/mean_norm_ratio": "mean / group norm",
    "diloco/momentum_cosine": "mean and momentum",
}

_DRAWN = ("inner_steps", "loss", "diloco/sync_seconds", *_DIRECTIONS)

Points = dict[str, list[dict[str, Any]]]
"""The syncs to draw, by group."""


def write_report(run_dir: str | Path) -> Path:
    """Draw ``loss.png``: every group's training loss by round, and how long its syncs blocked.

    Between them are the cosines of the pseudo-gradients, if there are any.

    Args:
        run_dir: The run's folder.

    Returns:
        The path of the picture.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: The run has committed no sync yet.
    """
    run = read_run(run_dir)
    if not any(run.metrics.values()):
        raise ValueError(
            f"{run.run_dir} has no committed sync in replica_<id>/{EVENTS}, so there is nothing "
            "to draw. The first comes after sync_every inner steps; if the run failed before, "
            "replica_<id>/log.txt says why"
        )
    # Imported here, because it takes a second. Agg, because the machine may have no display.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    points = {id: thin_out(lines, _DRAWN, MAX_POINTS) for id, lines in run.metrics.items()}
    longest = max(points.values(), key=len)  # the other groups have the same cosines
    has_directions = any(_has(line, key) for line in longest for key in _DIRECTIONS)
    ratios = (2.2, 1, 1) if has_directions else (2.2, 1)
    figure, (losses, *directions, costs) = pyplot.subplots(
        len(ratios),
        1,
        sharex=True,
        figsize=(8, 2 + 1.25 * sum(ratios)),
        height_ratios=ratios,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)  # pyright: ignore
    figure.suptitle(
        f"{run.run_dir.resolve().name}: {plural(len(run.metrics), 'replica group')}, "
        f"{plural(run.outer_steps, 'outer step')}"
    )
    _draw_losses(losses, run, points)
    for axes in directions:
        _draw_directions(axes, run, longest)
    _draw_costs(costs, run, points)
    rounds = f"round (1 round = {run.sync_every} inner steps)"
    costs.set_xlabel(rounds if run.sync_every else "inner steps")
    costs.set_xlim(left=0)
    costs.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (losses, *directions, costs):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path = run.run_dir / PICTURE
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _draw_losses(axes: Any, run: Run, points: Points) -> None:
    # A byte-level model's loss is in nats per byte; its evaluation is in bits.
    evaluation = run.evaluation
    scale = 1 / math.log(2) if "bits_per_byte" in evaluation else 1.0
    axes.set_ylabel("training loss (bits per byte)" if scale > 1 else "training loss")
    _draw_groups(axes, run, points, "loss", scale)
    for key, style, name in (
        ("unigram_bits_per_byte", (0, (1, 2)), "byte frequencies alone"),
        ("bits_per_byte", (0, (6, 2)), "held-out at the end"),
        ("data_parallel_bits_per_byte", (0, (3, 1, 1, 1)), "data parallel, held-out"),
    ):
        if key in evaluation:
            label = f"{name}: {evaluation[key]:.2f}"
            axes.axhline(evaluation[key], color="0.45", linestyle=style, linewidth=1.2, label=label)
    axes.legend(frameon=False, loc="upper right", ncols=2 if len(run.metrics) > 4 else 1)


def _draw_directions(axes: Any, run: Run, lines: list[dict[str, Any]]) -> None:
    for colour, (key, name) in zip(_COLOURS, _DIRECTIONS.items(), strict=False):
        x = [line["inner_steps"] / (run.sync_every or 1) for line in lines if _has(line, key)]
        y = [line[key] for line in lines if _has(line, key)]
        axes.plot(x, y, color=colour, linewidth=1.2, label=name)
    axes.axhline(0, color="0.45", linewidth=0.8)
    axes.set_ylabel("cosine of\npseudo-gradients")
    axes.set_ylim(-1.05, 1.05)
    axes.legend(frameon=False, loc="lower right", ncols=3, fontsize="small")


def _draw_costs(axes: Any, run: Run, points: Points) -> None:
    _draw_groups(axes, run, points, "diloco/sync_seconds", 1.0)
    seconds = sorted(line["diloco/sync_seconds"] for lines in points.values() for line in lines)
    # One slow sync, such as the first, would press all others onto the axis.
    if seconds[0] > 0 and seconds[-1] > 20 * seconds[len(seconds) // 2]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    computing = fmean(
        line["diloco/compute_fraction"] for lines in run.metrics.values() for line in lines
    )
    axes.set_ylabel("blocked per sync\n(seconds)")
    axes.set_title(f"training {computing:.0%} of the time", fontsize="medium", loc="right")


def _draw_groups(axes: Any, run: Run, drawn: Points, key: str, scale: float) -> None:
    for i, (replica_id, lines) in enumerate(drawn.items()):
        points = [
            (x["inner_steps"] / (run.sync_every or 1), x[key] * scale)
            for x in lines
            if _has(x, key)
        ]
        axes.plot(
            *zip(*points, strict=True) if points else ((), ()),
            color=_COLOURS[i % len(_COLOURS)],
            linestyle=_DASHES[i // len(_COLOURS) % len(_DASHES)],
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=4,
            # A marker on every point would hide the curve of a long run.
            markevery=max(1, len(points) // 20),
            linewidth=1.5,
            label=f"group {replica_id}",
        )


def _has(line: dict[str, Any], key: str) -> bool:
    return line.get(key) is not None and math.isfinite(line[key])
