"""What a run wrote into its folder -> a live table, ``summary.json``, a closing text, ``loss.png``.

Reads the run folder only, so it works on a run that is over, still going or was killed.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_replication.run_folder import METRICS, RESULT, STATUS

CONFIG = "config.yaml"
SUMMARY = "summary.json"
PICTURE = "loss.png"

TABLE_EVERY_S = 0.3
LINE_EVERY_S = 10.0

# Colours, and the rank that torch writes before every line of a traceback.
_DECORATION = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|^\[rank\d+\]: ?", re.MULTILINE)

# What Composer's launcher adds below the error of a rank that it quotes.
_LAUNCHERS_OWN = re.compile(r"(ERROR:__main__:|-{10}|Waiting up to|Global rank \d+ \(PID)")

# Okabe and Ito's colours, told apart by colour-blind people; the yellow is too pale for a line.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Run:
    """What is in a run folder.

    Attributes:
        run_dir: The folder.
        sync_every: Inner steps in a round; None if the folder does not say.
        metrics: The committed syncs of each replica group, by its id.
        results: How each group ended, by its id; those that did are in it.
    """

    run_dir: Path
    sync_every: int | None
    metrics: dict[str, list[dict[str, Any]]]
    results: dict[str, dict[str, Any]]

    @property
    def outer_steps(self) -> int:
        """Outer steps of the group that has made most."""
        steps = [line["diloco/outer_step"] for lines in self.metrics.values() for line in lines]
        return int(max(steps, default=0))

    @property
    def evaluation(self) -> dict[str, float]:
        """What the first group evaluated: all hold the same global parameters."""
        return next((result.get("eval") or {} for result in self.results.values()), {})

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each group's global parameters at its end."""
        return {id: result["global_digest"] for id, result in self.results.items()}


def read_run(run_dir: str | Path) -> Run:
    """Read a run folder.

    Raises:
        FileNotFoundError: There is no such folder, or no replica group has written into it.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(
            f"{run_dir} is not a folder: give the run folder that `composer-replication launch` "
            "printed, e.g. runs/<config>-<time>"
        )
    folders = {path.name.removeprefix("replica_"): path for path in run_dir.glob("replica_*/")}
    if not folders:
        raise FileNotFoundError(
            f"{run_dir} holds no replica_<id> folder, so no run was made in it: give a run folder, "
            "or start one with `composer-replication launch CONFIG --replicas 2`"
        )
    ids = sorted(folders, key=lambda id: (not id.isdecimal(), int(id) if id.isdecimal() else id))
    return Run(
        run_dir=run_dir,
        sync_every=_sync_every(run_dir),
        metrics={id: read_lines(folders[id] / METRICS)[0] for id in ids},
        results={
            id: json.loads((folders[id] / RESULT).read_text())
            for id in ids
            if (folders[id] / RESULT).exists()
        },
    )


def read_lines(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The JSON lines of a file from a byte on, and the byte after them.

    A last line without its end is left for the next time: its writer is at it, or was killed.
    """
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        whole, end, _ = file.read().rpartition(b"\n")
    lines = [json.loads(line) for line in whole.splitlines() if line.strip()]
    return lines, offset + len(whole) + len(end)


def _sync_every(run_dir: Path) -> int | None:
    path = run_dir / CONFIG  # a training script of somebody's own leaves none
    config = (yaml.safe_load(path.read_text()) if path.exists() else None) or {}
    section = (config.get("callbacks") or {}).get("diloco") or {}
    if "sync_every" in section:
        return section["sync_every"]
    statuses = [json.loads(path.read_text()) for path in run_dir.glob(f"replica_*/{STATUS}")]
    return next(filter(None, map(_implied_sync_every, statuses)), None)


def _implied_sync_every(status: Mapping[str, Any]) -> int | None:
    return round(status["inner_steps"] / status["round"]) if status.get("round") else None


def last_lines(path: Path, count: int = 12) -> list[str]:
    """The last lines of a log that say something: no frames of tracebacks, nothing twice."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        text = _DECORATION.sub("", file.read().decode(errors="replace"))
    lines: dict[str, None] = {}  # a set that keeps the order
    in_traceback = False
    for line in text.splitlines():
        in_traceback = line.startswith("Traceback (") or (in_traceback and line.startswith(" "))
        if line.strip() and not in_traceback and not _LAUNCHERS_OWN.match(line):
            lines[line.rstrip()] = None
    return list(lines)[-count:]


# ---- while it runs --------------------------------------------------------------------------


class Progress:
    """Where one replica group is, by its ``status.json`` and ``metrics.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offset = 0
        self.status: dict[str, Any] = {}
        self.participants: int | None = None
        self.digests: dict[int, str] = {}

    def read(self, exit_status: int | None) -> None:
        """Read what is new; a group that has ended has its exit status for a phase."""
        path = self._folder / STATUS
        if path.exists():
            self.status = json.loads(path.read_text())
        if exit_status is not None:
            self.status["phase"] = "failed" if exit_status else "finished"
        # From where we stopped: a long run's file has thousands of lines.
        lines, self._offset = read_lines(self._folder / METRICS, self._offset)
        for line in lines:
            self.participants = int(line["diloco/num_participants"])
            if line.get("diloco/global_digest"):
                self.digests[line["diloco/outer_step"]] = line["diloco/global_digest"]

    @property
    def phase(self) -> str:
        return self.status.get("phase", "starting")

    @property
    def round(self) -> str:
        if "round" not in self.status:
            return "-"
        batches, sync_every = self.status.get("max_batches"), _implied_sync_every(self.status)
        of = f" / {math.ceil(batches / sync_every)}" if batches and sync_every else ""
        return f"{int(self.status['round'])}{of}"

    @property
    def loss(self) -> str:
        loss = self.status.get("loss")
        return "-" if loss is None else f"{loss:.3f}"

    @property
    def time_left(self) -> str:
        seconds = self.status.get("seconds_left")
        return "-" if seconds is None or self.phase != "training" else duration(seconds)


class Display:
    """The groups' progress: a table on a terminal, else a line every ``LINE_EVERY_S``.

    Args:
        console: Where to.
        run_dir: The run's folder.
        replicas: Number of groups.
    """

    def __init__(self, console: Console, run_dir: Path, replicas: int) -> None:
        self._console = console
        # Drawn when we say, by this thread: nothing flickers, and nothing is drawn after the end.
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._groups = [Progress(run_dir / f"replica_{i}") for i in range(replicas)]
        self._began = self._shown = time.monotonic()

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def refresh(self, exit_statuses: Mapping[int, int | None], *, is_last: bool = False) -> None:
        """Show where the groups are, if it is time to."""
        every = TABLE_EVERY_S if self._live else LINE_EVERY_S
        if time.monotonic() < self._shown + every and not is_last:
            return
        self._shown = time.monotonic()
        for replica_id, group in enumerate(self._groups):
            group.read(exit_statuses.get(replica_id))
        if self._live:
            self._live.update(Group(self._table(), Text(self._agreement())), refresh=True)
        else:
            self._console.print(self._line(), markup=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name, justify in (("group", "left"), ("phase", "left"), ("round", "right")):
            table.add_column(name, justify=justify, no_wrap=True, min_width=7)  # pyright: ignore
        table.add_column("")
        table.add_column("loss", justify="right", no_wrap=True)
        table.add_column("time left", justify="right", no_wrap=True)
        for replica_id, group in enumerate(self._groups):
            batches = group.status.get("max_batches")
            done = group.status.get("batch", 0)
            bar = (
                ProgressBar(batches, done, width=30, complete_style="cyan", finished_style="green")
                if batches
                else ""
            )
            table.add_row(
                str(replica_id), group.phase, group.round, bar, group.loss, group.time_left
            )
        return table

    def _line(self) -> str:
        groups = [
            f"group {replica_id} {group.phase}, round {group.round}, loss {group.loss}"
            for replica_id, group in enumerate(self._groups)
        ]
        left = [group.time_left for group in self._groups if group.time_left != "-"]
        parts = [*groups, self._agreement(), *(f"{left[0]} left" for _ in left[:1])]
        return f"{duration(time.monotonic() - self._began):>12}  {'; '.join(filter(None, parts))}"

    def _agreement(self) -> str:
        """The outer step, who took part in it, and whether the groups hold the same."""
        outer_step = max(group.status.get("outer_step", 0) for group in self._groups)
        counts = [group.participants for group in self._groups if group.participants is not None]
        if not counts:
            return ""
        text = f"outer step {outer_step}, {min(counts)} participants"
        common = set.intersection(*(set(group.digests) for group in self._groups))
        if common and len(self._groups) > 1:
            digests = {group.digests[max(common)] for group in self._groups}
            equal = f": {digests.pop()[:8]}" if len(digests) == 1 else ""
            text += f", {'equal' if equal else 'DIFFERENT'} at outer step {max(common)}{equal}"
        return text


def duration(seconds: float) -> str:
    """Seconds in words."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


# ---- when it is over ------------------------------------------------------------------------


def write_summary(run: Run, restarts: dict[str, int]) -> dict[str, Any]:
    """Write ``summary.json``, and return what is in it."""
    fields = ("inner_steps", "outer_steps", "global_digest", "final_loss")
    summary = {
        "outer_steps": max((r["outer_steps"] for r in run.results.values()), default=0),
        "replicas": [
            {"replica_id": id, **{name: result.get(name) for name in fields}}
            | {"restarts": restarts.get(id, 0)}
            for id, result in run.results.items()
        ],
        "eval": run.evaluation,
    }
    (run.run_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def describe(run: Run) -> list[tuple[str, str]]:
    """The closing text: what came out of a run, as names and values."""
    rows = []
    bits = run.evaluation
    if "bits_per_byte" in bits:
        floors = [name for name in ("unigram", "uniform") if f"{name}_bits_per_byte" in bits]
        beside = ", ".join(f"{name} {bits[f'{name}_bits_per_byte']:.3f}" for name in floors)
        rows.append(("held-out bits per byte", f"{bits['bits_per_byte']:.3f}   ({beside})"))
    if run.digests:
        rows.append(("global parameters", describe_digests(run)))
    rows += _describe_traffic(run)
    return rows


def describe_digests(run: Run) -> str:
    """Whether all groups ended with the same global parameters, bit for bit."""
    digests = run.digests
    if len(set(digests.values())) == 1:
        groups = "in 1 group" if len(digests) == 1 else f"equal in {len(digests)} groups"
        steps = _count(run.outer_steps, "outer step")
        return f"{groups} after {steps}: {next(iter(digests.values()))[:8]}"
    each = ", ".join(
        f"group {id} {digest[:8]} ({_count(run.results[id]['outer_steps'], 'outer step')})"
        for id, digest in digests.items()
    )
    return f"DIFFERENT: {each}"


def _describe_traffic(run: Run) -> list[tuple[str, str]]:
    lines = max(run.metrics.values(), key=len)
    sent = sum(line["diloco/bytes_sent"] for line in lines)
    if not sent:
        return []
    # Data parallel averages every parameter in every inner step: each fragment once.
    per_fragment = {line["diloco/fragment"]: line["diloco/bytes_sent"] for line in lines}
    inner_steps = max(line["inner_steps"] for line in lines)
    data_parallel = inner_steps * sum(per_fragment.values())
    text = (
        f"{_size(sent)} in {_count(len(lines), 'sync')}; data parallel: {_size(data_parallel)} in "
        f"{inner_steps} inner steps ({data_parallel / sent:.0f} times as much)"
    )
    return [("sent by each group", text)]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + "s" * (number != 1)


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def write_report(run_dir: str | Path) -> Path:
    """Draw ``loss.png``: training loss by round for every group, and what its syncs cost.

    Raises:
        FileNotFoundError: There is no run in this folder.
        ValueError: The run has committed no sync yet.
    """
    run = read_run(run_dir)
    if not any(run.metrics.values()):
        raise ValueError(
            f"{run.run_dir} has no committed sync in replica_<id>/{METRICS}, so there is nothing "
            "to draw. The first comes after sync_every inner steps; if the run failed before, "
            "replica_<id>/log.txt says why"
        )
    # Here, because importing it takes a second; Agg, because a display may be missing.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, (losses, costs) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2.2, 1), layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)  # pyright: ignore
    figure.suptitle(
        f"{run.run_dir.resolve().name}: {_count(len(run.metrics), 'replica group')}, "
        f"{_count(run.outer_steps, 'outer step')}"
    )
    _draw_losses(losses, run)
    _draw_costs(costs, run)
    rounds = f"round (1 round = {run.sync_every} inner steps)"
    costs.set_xlabel(rounds if run.sync_every else "inner steps")
    costs.set_xlim(left=0)
    costs.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (losses, costs):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path = run.run_dir / PICTURE
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _draw_losses(axes: Any, run: Run) -> None:
    # A byte-level model's loss is in nats per byte; its evaluation is in bits.
    evaluation = run.evaluation
    scale = 1 / math.log(2) if "bits_per_byte" in evaluation else 1.0
    axes.set_ylabel("training loss (bits per byte)" if scale > 1 else "training loss (nats)")
    _draw_groups(axes, run, "loss", scale)
    for key, style, name in (
        ("unigram_bits_per_byte", (0, (1, 2)), "byte frequencies alone"),
        ("bits_per_byte", (0, (6, 2)), "held-out at the end"),
    ):
        if key in evaluation:
            label = f"{name}: {evaluation[key]:.2f}"
            axes.axhline(evaluation[key], color="0.45", linestyle=style, linewidth=1.2, label=label)
    axes.legend(frameon=False, loc="upper right", ncols=2 if len(run.metrics) > 4 else 1)


def _draw_costs(axes: Any, run: Run) -> None:
    _draw_groups(axes, run, "diloco/sync_seconds", 1.0)
    lines = [line for lines in run.metrics.values() for line in lines]
    seconds = sorted(line["diloco/sync_seconds"] for line in lines)
    # One slow sync, such as the first, would press all others onto the axis.
    if seconds[0] > 0 and seconds[-1] > 20 * seconds[len(seconds) // 2]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    computing = sum(line["diloco/compute_fraction"] for line in lines) / len(lines)
    axes.set_ylabel("blocked per sync\n(seconds)")
    axes.set_title(f"training {computing:.0%} of the time", fontsize="medium", loc="right")


def _draw_groups(axes: Any, run: Run, key: str, scale: float) -> None:
    for i, (replica_id, lines) in enumerate(run.metrics.items()):
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
            # So that many rounds stay a line and few stay points.
            markevery=max(1, len(points) // 20),
            linewidth=1.5,
            label=f"group {replica_id}",
        )


def _has(line: dict[str, Any], key: str) -> bool:
    return line.get(key) is not None and math.isfinite(line[key])
