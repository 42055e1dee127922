"""Which trainings the study consists of, in the order in which they are run.

A stage's settings were chosen after the stages before it; what each is for is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from cells import CLAIM_SEEDS, TUNING_SEEDS, Cell

DATA_PARALLEL = Cell(lr=5.6e-3)
"""With AdamW, at the best inner learning rate of the tuning seeds."""

TWO = Cell(groups=2, lr=4e-3, outer_lr=0.7, outer_momentum=0.5)

DATA_PARALLEL_MUON = replace(DATA_PARALLEL, inner="muon", lr=1.2e-2)
"""The best data parallel of all: what the arms are compared with."""

TWO_MUON = replace(TWO, inner="muon", lr=8e-3)
TWO_SHORT = replace(TWO_MUON, early=5)
"""What configs/quickstart.yaml trains: rounds of 5 inner steps for 300 steps, then of 30."""

TWO_LONG = replace(TWO_MUON, sync_every=15, steps=3600)
"""Two groups with rounds of 15 and twice as many inner steps as in the other arms."""

TWO_WARM_LONG = replace(TWO_SHORT, steps=3600)
FOUR_LONG = replace(TWO_WARM_LONG, groups=4)
EIGHT_LONG = replace(TWO_WARM_LONG, groups=8)
"""17 bytes a parameter, near the 20 tokens of the published fit."""

DATA_PARALLEL_LONG = replace(DATA_PARALLEL_MUON, steps=3600)
FOUR_MUON = replace(TWO_MUON, groups=4)
EIGHT_MUON = replace(TWO_MUON, groups=8)
WHOLE = replace(TWO_MUON, sync_every=32, steps=1920)
FRAGMENTS = replace(WHOLE, num_fragments=4)
DELAYED = replace(FRAGMENTS, delay=2, alpha=0.5)
DATA_PARALLEL_HUNDRED = replace(DATA_PARALLEL_MUON, steps=6000)
HUNDRED = replace(TWO_MUON, sync_every=100, steps=6000, early=5)
EIGHT_LONG_STEPS = replace(EIGHT_MUON, merge="rda")
EIGHT_RADIAL = replace(EIGHT_LONG_STEPS, outer_lr=0.45)
SIX_LONG_STEPS = replace(EIGHT_LONG_STEPS, groups=6, batch=12)
SIX_RADIAL = replace(EIGHT_RADIAL, groups=6, batch=12)
"""As many samples in all as eight, four and eight groups with as many in each."""

SIX_SHORT = replace(SIX_RADIAL, early=5)

CONSTANT_BATCH = replace(DATA_PARALLEL_MUON, batch=12)
CHANGING_BATCH = replace(CONSTANT_BATCH, batches=(16, 8, 8, 16))
"""Data parallel with the batches of six groups, and of eight, four and eight."""

EQUAL = replace(TWO_MUON, groups=3, batch=24, sync_every=20)
UNEQUAL = replace(EQUAL, sync_every=30, steps=2700, step_times=(1.0, 1.5, 3.0))
"""As many rounds and samples as the equal ones."""


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
    base: Cell = DATA_PARALLEL_MUON
    against: str = "data parallel"
    is_drawn: bool = False


FIRST_ARMS = (
    Arm("data parallel", DATA_PARALLEL_MUON, DATA_PARALLEL_MUON, "-", is_drawn=True),
    Arm("2 groups, H = 30, warm-up", TWO_SHORT, is_drawn=True),
    Arm("2 groups, H = 15, warm-up", replace(TWO_SHORT, sync_every=15)),
    Arm("2 groups, H = 15", replace(TWO_MUON, sync_every=15)),
    Arm("2 groups, H = 30", TWO_MUON, is_drawn=True),
)

LONG_ARMS = (
    Arm("data parallel, 3,600 steps", DATA_PARALLEL_LONG, DATA_PARALLEL_LONG, "-"),
    Arm("2 groups, H = 30, warm-up, 3,600 steps", TWO_WARM_LONG, DATA_PARALLEL_LONG, "same length"),
    Arm("4 groups, H = 30, warm-up, 3,600 steps", FOUR_LONG, DATA_PARALLEL_LONG, "same length"),
    Arm("8 groups, H = 30, warm-up, 3,600 steps", EIGHT_LONG, DATA_PARALLEL_LONG, "same length"),
    Arm("2 groups, H = 15, 3,600 steps", TWO_LONG, DATA_PARALLEL_LONG, "same length"),
)

SECOND_ARMS = (
    Arm("1 group, H = 30", replace(TWO_MUON, groups=1)),
    Arm("4 groups, H = 30, warm-up", replace(FOUR_MUON, early=5)),
    Arm("8 groups, H = 30, warm-up", replace(EIGHT_MUON, early=5), is_drawn=True),
    Arm("8 groups, H = 30, warm-up, rda", replace(EIGHT_RADIAL, early=5)),
    Arm("8 groups, H = 30, warm-up, rda, outer lr 0.7", replace(EIGHT_LONG_STEPS, early=5)),
    Arm("data parallel, AdamW", DATA_PARALLEL, is_drawn=True),
    Arm(
        "8 groups, H = 30, warm-up, AdamW",
        replace(TWO, groups=8, early=5),
        DATA_PARALLEL,
        "data parallel, AdamW",
    ),
)

THIRD_ARMS = (
    Arm("2 groups, int8", replace(TWO_MUON, wire_format="int8"), TWO_MUON, "2 groups, H = 30"),
    Arm("2 groups, fp4", replace(TWO_MUON, wire_format="fp4"), TWO_MUON, "2 groups, H = 30"),
    Arm("2 groups, H = 32", WHOLE, WHOLE, "-"),
    Arm("4 fragments, H = 32", FRAGMENTS, WHOLE, "2 groups, H = 32"),
    Arm("4 fragments, delay 2, H = 32", DELAYED, WHOLE, "2 groups, H = 32"),
)

FOURTH_ARMS = (
    Arm("6 groups of 2 samples, warm-up, rda", SIX_SHORT, SIX_SHORT, "-"),
    Arm(
        "8, 4 and 8 groups, warm-up, rda",
        replace(EIGHT_RADIAL, away=4, early=5),
        SIX_SHORT,
        "6 groups, warm-up",
    ),
    Arm("6 groups of 2 samples, rda", SIX_RADIAL, SIX_RADIAL, "-"),
    Arm("8, 4 and 8 groups, rda", replace(EIGHT_RADIAL, away=4), SIX_RADIAL, "6 groups"),
    Arm("8, 4 and 8 groups", replace(EIGHT_MUON, away=4), SIX_RADIAL, "6 groups, rda"),
    Arm("6 groups of 2 samples, rda, outer lr 0.7", SIX_LONG_STEPS, SIX_LONG_STEPS, "-"),
    Arm(
        "8, 4 and 8 groups, rda, outer lr 0.7",
        replace(EIGHT_LONG_STEPS, away=4),
        SIX_LONG_STEPS,
        "6 groups, rda, outer lr 0.7",
    ),
    Arm("data parallel, batch 12", CONSTANT_BATCH, CONSTANT_BATCH, "-"),
    Arm(
        "data parallel, batch 16, 8 and 16",
        CHANGING_BATCH,
        CONSTANT_BATCH,
        "data parallel, batch 12",
    ),
    Arm("data parallel, 6,000 steps", DATA_PARALLEL_HUNDRED, DATA_PARALLEL_HUNDRED, "-"),
    Arm("2 groups, H = 100, warm-up, 6,000 steps", HUNDRED, DATA_PARALLEL_HUNDRED, "same length"),
    Arm("3 groups, H = 20", EQUAL, EQUAL, "-"),
    Arm("3 groups of speeds 1, 1.5 and 3", UNEQUAL, EQUAL, "3 groups, H = 20"),
)

LAST_ARMS = (
    Arm("2 groups, H = 30, AdamW", TWO, DATA_PARALLEL, "data parallel, AdamW"),
    Arm("4 groups, H = 30", FOUR_MUON),
    Arm("8 groups, H = 30", EIGHT_MUON),
)

ARMS = FIRST_ARMS + LONG_ARMS + SECOND_ARMS + THIRD_ARMS + FOURTH_ARMS + LAST_ARMS


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
    yield replace(DATA_PARALLEL, batch=32, lr=8e-3)
    yield replace(TWO, batch=32, lr=5.6e-3)
    yield replace(TWO, batch=32, lr=8e-3)
    yield replace(DATA_PARALLEL, batch=32, lr=5.6e-3)


def _short_round_look() -> Iterator[Cell]:
    """How much of the gap shorter rounds close, all of them or only the first, and Muon's rates."""
    muon = replace(TWO, inner="muon", lr=8e-3)
    yield replace(TWO, early=5)
    yield replace(muon, early=5)
    yield replace(muon, sync_every=15)
    yield replace(DATA_PARALLEL, inner="muon", lr=1.2e-2)
    yield replace(muon, lr=1.2e-2)
    yield replace(muon, outer_lr=1.0)


def _muon_groups_look() -> Iterator[Cell]:
    """Four and eight groups with Muon inside, and eight of them with the radial merge."""
    muon = replace(TWO, inner="muon", lr=8e-3)
    yield replace(muon, groups=4)
    yield replace(DATA_PARALLEL, inner="muon", lr=5.6e-3)
    yield replace(muon, groups=8)
    yield replace(muon, groups=8, merge="rda")


def _outer_look() -> Iterator[Cell]:
    """The outer settings with Muon inside, towards more momentum."""
    for outer_lr, momentum in ((0.7, 0.7), (0.6, 0.8), (1.0, 0.5)):
        yield replace(TWO_MUON, outer_lr=outer_lr, outer_momentum=momentum)


def _plain_average_look() -> Iterator[Cell]:
    """Outer settings towards the plain average of the groups, in short rounds."""
    yield replace(TWO_MUON, sync_every=15, outer_lr=1.0, outer_momentum=0.0)
    yield replace(TWO_MUON, sync_every=15, outer_lr=0.9, outer_momentum=0.3)
    yield replace(TWO_MUON, sync_every=15, outer_lr=1.0, outer_momentum=0.0, lr=1.2e-2)


def _base() -> Iterator[Cell]:
    """Data parallel, which most arms are compared with."""
    for seed in CLAIM_SEEDS[:5]:
        yield DATA_PARALLEL_MUON.with_seed(seed)


def _quickstart() -> Iterator[Cell]:
    """The training of the quickstart, on the first five seeds of the claims."""
    for seed in CLAIM_SEEDS[:5]:
        yield TWO_SHORT.with_seed(seed)


def _muon_lr_look() -> Iterator[Cell]:
    """Higher inner learning rates with Muon inside, which data parallel gains from."""
    yield replace(DATA_PARALLEL_MUON, lr=1.6e-2)
    yield replace(TWO_MUON, sync_every=15, lr=1.2e-2)
    yield replace(TWO_MUON, sync_every=10)
    yield replace(TWO_MUON, sync_every=15, lr=1.2e-2, outer_lr=0.8, outer_momentum=0.2)
    yield replace(TWO_MUON, sync_every=15, lr=1e-2)


def _length_look() -> Iterator[Cell]:
    """Whether twice as many steps narrow the gap."""
    yield TWO_LONG
    yield DATA_PARALLEL_LONG
    yield replace(TWO_MUON, steps=3600)
    yield replace(DATA_PARALLEL_LONG, lr=8e-3)


def _early_look() -> Iterator[Cell]:
    """Whether short rounds close the gap, all of them or only the first; on all tuning seeds."""
    short = replace(TWO_MUON, sync_every=5)
    for seed in TUNING_SEEDS:
        yield DATA_PARALLEL_MUON.with_seed(seed)
        yield short.with_seed(seed)
        yield replace(TWO_MUON, sync_every=15, early=5).with_seed(seed)


def _warm_look() -> Iterator[Cell]:
    """With a warm-up: data parallel's learning rate, and still shorter rounds."""
    yield replace(TWO_SHORT, sync_every=15, lr=1.2e-2)
    yield replace(TWO_SHORT, sync_every=15, early=2)


def _groups_look() -> Iterator[Cell]:
    """Four and eight groups with larger outer steps: the mean of more groups is shorter."""
    for momentum in (0.7, 0.8):
        yield replace(EIGHT_MUON, early=5, outer_lr=0.8, outer_momentum=momentum)
        yield replace(FOUR_MUON, early=5, outer_lr=0.8, outer_momentum=momentum - 0.1)


def _radial_look() -> Iterator[Cell]:
    """Eight groups with ``rda`` and smaller outer steps: its mean is not shorter than a group's."""
    eight = replace(EIGHT_MUON, early=5)
    yield replace(eight, merge="rda", outer_lr=0.45)
    yield eight
    yield replace(eight, merge="rda", outer_lr=0.55)
    yield replace(eight, merge="rda", outer_lr=0.35)


def _muon_batch_look() -> Iterator[Cell]:
    """Whether a larger batch narrows the gap with Muon inside."""
    for lr in (8e-3, 1.2e-2):
        yield replace(TWO_SHORT, batch=32, lr=lr)
    for lr in (1.2e-2, 1.6e-2):
        yield replace(DATA_PARALLEL_MUON, batch=32, lr=lr)


def _momentum_look() -> Iterator[Cell]:
    """Whether the inner optimizer should average over more steps, which have few samples here."""
    yield replace(TWO_SHORT, momentum=0.975, beta2=0.975)
    yield replace(TWO_SHORT, momentum=0.9)
    yield replace(DATA_PARALLEL_MUON, momentum=0.9)
    yield replace(EIGHT_MUON, early=5, momentum=0.99, beta2=0.99)


def _long() -> Iterator[Cell]:
    """Twice as many steps, near the length of the published fit: two groups first."""
    for arms in (LONG_ARMS[:2], LONG_ARMS[2:4]):
        for seed, arm in product(CLAIM_SEEDS[:5], arms):
            yield arm.cell.with_seed(seed)


def _changing_groups() -> Iterator[Cell]:
    """Groups that come and go, with a warm-up as it is recommended, on two further seeds."""
    for seed, arm in product(CLAIM_SEEDS[1:3], FOURTH_ARMS[:2]):
        yield arm.cell.with_seed(seed)


def _changing_batch() -> Iterator[Cell]:
    """What a batch that changes costs data parallel, as the samples of groups that come and go."""
    for seed, cell in product(CLAIM_SEEDS[:2], (CONSTANT_BATCH, CHANGING_BATCH)):
        yield cell.with_seed(seed)


def _eleven_seeds() -> Iterator[Cell]:
    """The quickstart's training against data parallel, on all seeds; a third one of the formats."""
    for seed in CLAIM_SEEDS[5:]:
        yield DATA_PARALLEL_MUON.with_seed(seed)
        yield TWO_SHORT.with_seed(seed)
    for arm in THIRD_ARMS:
        yield arm.cell.with_seed(CLAIM_SEEDS[2])


def _claims() -> Iterator[Cell]:
    """All arms, one seed of each before the rest: whatever has been run can be compared."""
    for seeds in (CLAIM_SEEDS[:1], CLAIM_SEEDS[1:2], CLAIM_SEEDS[2:3], CLAIM_SEEDS[3:]):
        for arms in (FIRST_ARMS, THIRD_ARMS, SECOND_ARMS, FOURTH_ARMS, LONG_ARMS + LAST_ARMS):
            for seed, arm in product(seeds, arms):
                yield arm.cell.with_seed(seed)


STAGES = {
    "first look": _first_look,
    "muon look": _muon_look,
    "batch look": _batch_look,
    "short round look": _short_round_look,
    "muon groups look": _muon_groups_look,
    "outer look": _outer_look,
    "muon lr look": _muon_lr_look,
    "length look": _length_look,
    "plain average look": _plain_average_look,
    "early look": _early_look,
    "warm look": _warm_look,
    "groups look": _groups_look,
    "muon batch look": _muon_batch_look,
    "radial look": _radial_look,
    "momentum look": _momentum_look,
    "base": _base,
    "quickstart": _quickstart,
    "long": _long,
    "changing groups": _changing_groups,
    "changing batch": _changing_batch,
    "eleven seeds": _eleven_seeds,
    "claims": _claims,
}


def cells(stage: str | None = None) -> Iterator[Cell]:
    """The trainings of a stage, or of all of them."""
    for name, make in STAGES.items():
        if stage in (None, name):
            yield from make()


assert Cell().seed == TUNING_SEEDS[0]
