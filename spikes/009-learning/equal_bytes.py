"""The arms of the study of what ships that are compared at equal bytes."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import product

from arms import DATA_PARALLEL, DATA_PARALLEL_32, DATA_PARALLEL_MUON, EIGHT_SHORT, FOUR_SHORT, TWO
from cells import EARLY_STEPS, Cell

ARM_SEEDS = range(1, 6)


def following_the_rate(cell: Cell, first: int, most: int) -> Cell:
    """Rounds that grow as one over the square of the learning rate (QSR), by steps of 5.

    Args:
        cell: Its warm-up of short rounds stays.
        first: The inner steps in a round after that.
        most: In any round.
    """
    rounds, step, outer_step = {}, EARLY_STEPS, EARLY_STEPS // cell.early + 1
    while step < cell.steps:
        progress = (step - 50) / (cell.steps - 50)  # as in train.py
        rate = cell.final_lr + (1 - cell.final_lr) * (1 + math.cos(math.pi * progress)) / 2
        steps = min(most, max(first, round(first / rate**2 / 5) * 5))
        if steps not in rounds.values():
            rounds[outer_step] = steps
        step, outer_step = step + steps, outer_step + 1
    (_, steps), *others = rounds.items()
    return replace(cell, sync_every=steps, rounds=tuple(others))


def equal_bytes(groups: int) -> dict[str, Cell]:
    """The arms for so many groups, 16 samples a step in all: all but the first two cost bytes."""
    base = {4: FOUR_SHORT, 8: EIGHT_SHORT}[groups]
    slow = replace(base, momentum=0.99, slow=0.9)
    adamw = replace(TWO, groups=groups, early=5)
    arms = {
        "data parallel": DATA_PARALLEL_MUON,
        "H = 30": base,
        "H = 15": replace(base, sync_every=15),
        "averaged state": replace(base, periods=(1, 1)),
        "averaged state, 3 and 6": replace(base, periods=(3, 6)),
        "H = 10": replace(base, sync_every=10),
        "slow momentum": slow,
        "slow momentum, averaged": replace(slow, periods=(1, 1)),
        "H by the rate": following_the_rate(base, 15, 120),
        "H = 15, no short rounds": replace(base, sync_every=15, early=0),
        "data parallel, AdamW": DATA_PARALLEL,
        "AdamW, H = 30": adamw,
        "AdamW, H = 15": replace(adamw, sync_every=15),
        "AdamW, H = 6": replace(adamw, sync_every=6),
        "AdamW, averaged state": replace(adamw, periods=(1, 1)),
        "AdamW, averaged state, 3 and 6": replace(adamw, periods=(3, 6)),
    }
    if groups == 4:
        of_eight = {"lr": DATA_PARALLEL_32.lr, "batch": 32}
        return arms | {
            "data parallel, batch 32": DATA_PARALLEL_32,
            "8 samples a group": replace(base, **of_eight),
            "8 samples a group, averaged state": replace(base, **of_eight, periods=(1, 1)),
        }
    changing = replace(base, away=4)
    return arms | {
        "8, 4 and 8 groups": changing,
        "8, 4 and 8 groups, averaged state": replace(changing, periods=(1, 1)),
    }


GO_ON = (
    *("H = 30", "H = 15", "H = 10", "averaged state"),
    *("8, 4 and 8 groups", "8, 4 and 8 groups, averaged state"),
)
"""The arms that are trained after those of four groups with the first seed. A plain arm of about as
many bytes had less loss than each of the others there."""


def arms_of(groups: int, seeds: Iterable[int], names: Container[str] = ()) -> Iterator[Cell]:
    for seed, (name, cell) in product(seeds, equal_bytes(groups).items()):
        if not names or name in names:
            yield cell.with_seed(seed)
