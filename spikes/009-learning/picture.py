"""The picture of README: held-out loss along a training of one, two and four groups.

    python spikes/009-learning/picture.py          # draws docs/learning.png from picture.jsonl
    python spikes/009-learning/picture.py --train  # trains what is missing first, for ten minutes

The trainings are as somebody may begin them: the small GPT of ``warm.md``, nothing set but
``sync_every``, and 8 samples in a step of each group.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

from candidates import SAMPLES, SEEDS
from cells import Cell
from lines import HERE, Lines, append, read
from warm import CHOSEN, Row, candidates, gain

PICTURE = Path(__file__).parents[2] / "docs" / "learning.png"
LINES = HERE / "picture.jsonl"

STEPS, LR, EVERY, LENGTH = 600, 3e-3, 20, 64
"""Inner steps, their peak learning rate, steps between two evaluations, and bytes in a sample."""


def cells() -> dict[str, Cell]:
    """The training of each line of the picture."""
    two, four = (Row(groups, STEPS, LR) for groups in (2, 4))
    named = {
        "one group alone": replace(four.base, alone_of=4),
        "2 groups": candidates(two.base, 2, two.sync_every)[CHOSEN],
        "4 groups": candidates(four.base, 4, four.sync_every)[CHOSEN],
        "data parallel, 4 groups": four.base,
    }
    return {name: replace(cell, curve=EVERY) for name, cell in named.items()}


def train_missing() -> None:
    """Train what is not in the results."""
    import torch
    from train import train

    torch.set_num_threads(1)
    where = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(where, capture_output=True, text=True, check=False).stdout.strip()
    for seed in SEEDS:
        for cell in cells().values():
            own = cell.with_seed(seed)
            if own.key not in read(LINES):
                result = {"commit": commit, "torch": torch.__version__, **train(own)}
                append(LINES, {"cell": json.loads(own.key), **result})


def seeds_of(done: Lines) -> list[int]:
    """The seeds with which all lines have been trained."""
    each = [(seed, [cell.with_seed(seed).key for cell in cells().values()]) for seed in SEEDS]
    return [seed for seed, keys in each if done.keys() >= set(keys)]


def curves(done: Lines) -> dict[str, list[float]]:
    """The held-out loss of each line in bits per byte, as a mean over the seeds."""
    found = {}
    for name, cell in cells().items():
        of_seeds = [done[cell.with_seed(seed).key]["held_out"] for seed in seeds_of(done)]
        found[name] = [statistics.fmean(values) for values in zip(*of_seeds, strict=True)]
    return found


def gain_of_four(done: Lines) -> float | None:
    """The gain of four groups at the end."""
    alone, _, four, base = (curve[-1] for curve in curves(done).values())
    return gain(alone, base, four)


def times_fewer(cell: Cell) -> float:
    """How many times fewer bytes than data parallel: it sends in each step, groups in a sync."""
    ((first_long, sync_every),) = cell.rounds
    short = first_long - 1
    return cell.steps / (short + (cell.steps - short * cell.sync_every) / sync_every)


def draw(done: Lines, path: Path) -> None:
    """Draw the held-out loss against what each group has trained on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    colors = ("0.6", "C0", "C3", "0.0")
    for color, (name, curve) in zip(colors, curves(done).items(), strict=True):
        cell = cells()[name]
        tokens = [(index + 1) * EVERY * SAMPLES * LENGTH / 1e3 for index in range(len(curve))]
        sent = f": {times_fewer(cell):.0f} times fewer bytes" if cell.groups else ""
        style = "-" if cell.groups else "--"
        axes.plot(tokens, curve, style, color=color, label=name + sent, linewidth=1.8)
    axes.set(xlabel="thousand tokens that each group has trained on")
    axes.set(ylabel="held-out loss, bits per byte", ylim=(3.5, 4.9))  # it begins at 5.4
    axes.legend(fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="train what is missing first")
    if parser.parse_args().train:
        train_missing()
    draw(read(LINES), PICTURE)


if __name__ == "__main__":
    main()
