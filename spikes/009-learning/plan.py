"""Which trainings the study consists of, in the order in which they are run.

A stage's settings were chosen after the stages before it; what each is for is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cells import CLAIM_SEEDS, TUNING_SEEDS, Cell

DATA_PARALLEL = Cell(lr=5.6e-3)
"""At the best inner learning rate of the tuning seeds."""

TWO = Cell(groups=2, lr=4e-3, outer_lr=0.7, outer_momentum=0.5)


@dataclass(frozen=True)
class Arm:
    """What the study makes a claim of.

    Attributes:
        name: In the table and in the picture.
        cell: Its training.
        base: The training that it is compared with, seed by seed.
        against: The name of that.
        is_drawn: Whether the picture has its training loss.
    """

    name: str
    cell: Cell
    base: Cell = DATA_PARALLEL
    against: str = "data parallel"
    is_drawn: bool = False


ARMS = (
    Arm("data parallel", DATA_PARALLEL, is_drawn=True),
    Arm("2 groups, H = 30", TWO, is_drawn=True),
)


def _first_look() -> Iterator[Cell]:
    """Where the best settings lie: one tuning seed, wide steps."""
    for lr, (outer_lr, momentum) in product((5.6e-3, 4e-3), ((0.7, 0.5), (0.9, 0.3), (0.5, 0.7))):
        yield replace(TWO, lr=lr, outer_lr=outer_lr, outer_momentum=momentum)
    for lr in (4e-3, 5.6e-3, 8e-3, 2.8e-3):
        yield replace(DATA_PARALLEL, lr=lr)


def _muon_look() -> Iterator[Cell]:
    """Where the best settings lie with Muon as the inner optimizer."""
    for lr in (8e-3, 4e-3):
        for outer_lr, momentum in ((0.7, 0.5), (0.9, 0.3)):
            yield replace(TWO, inner="muon", lr=lr, outer_lr=outer_lr, outer_momentum=momentum)
        yield replace(DATA_PARALLEL, inner="muon", lr=lr)


def _batch_look() -> Iterator[Cell]:
    """Whether a larger batch narrows the gap: data parallel gains less from one than from two."""
    for batch, lr in ((32, 5.6e-3), (32, 8e-3)):
        yield replace(DATA_PARALLEL, batch=batch, lr=lr)
    yield replace(TWO, batch=32)
    yield replace(TWO, batch=32, lr=5.6e-3)


def _length_look() -> Iterator[Cell]:
    """Whether twice as many steps narrow the gap."""
    yield replace(DATA_PARALLEL, steps=3600)
    yield replace(TWO, steps=3600)


def _claims() -> Iterator[Cell]:
    """All arms, seed by seed, so that whatever has been run can be compared."""
    for seed in CLAIM_SEEDS:
        for arm in ARMS:
            yield arm.cell.with_seed(seed)


STAGES = {
    "first look": _first_look,
    "muon look": _muon_look,
    "batch look": _batch_look,
    "length look": _length_look,
    "claims": _claims,
}


def cells(stage: str | None = None) -> Iterator[Cell]:
    """The trainings of a stage, or of all of them."""
    for name, make in STAGES.items():
        if stage in (None, name):
            yield from make()


assert Cell().seed == TUNING_SEEDS[0]
