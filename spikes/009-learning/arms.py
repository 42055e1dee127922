"""The arms of the study: what a claim is made of, and what it is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cells import Cell

DATA_PARALLEL = Cell(lr=5.6e-3)
"""With AdamW, at the best inner learning rate of the tuning seeds."""

TWO = Cell(groups=2, lr=4e-3, outer_lr=0.7, outer_momentum=0.5)

DATA_PARALLEL_MUON = replace(DATA_PARALLEL, inner="muon", lr=1.2e-2)
"""The best data parallel of all: what the arms are compared with."""

TWO_MUON = replace(TWO, inner="muon", lr=8e-3)
TWO_SHORT = replace(TWO_MUON, early=5)

TWO_SHORT_ROUNDS = replace(TWO_MUON, sync_every=6, rounds=((61, 30),))
"""Two groups with short rounds first, and momentum at once: once the defaults."""

DATA_PARALLEL_COMPOSER = replace(DATA_PARALLEL_MUON, lag=1)
QUICKSTART = replace(
    TWO_SHORT_ROUNDS,
    lag=1,
    outer_lr=1.0,
    outer_momentum=0.0,
    outer=((21, 0.7, 0.5),),
)
"""What configs/quickstart.yaml trains, to the last bit, and what it is compared with."""

TWO_LONG = replace(TWO_MUON, sync_every=15, steps=3600)
"""Two groups with rounds of 15 and twice as many inner steps as in the other arms."""

TWO_WARM_LONG = replace(TWO_SHORT, steps=3600)
FOUR_LONG = replace(TWO_WARM_LONG, groups=4)
EIGHT_LONG = replace(TWO_WARM_LONG, groups=8)
"""17 bytes a parameter, near the 20 tokens of the published fit."""

FOUR_SHORT = replace(TWO_SHORT, groups=4, lr=1.2e-2)
EIGHT_SHORT = replace(TWO_SHORT, groups=8, lr=1.2e-2)
"""At the best inner learning rate of a tuning seed, which is higher than that of two groups."""

FOUR_OFTEN = replace(FOUR_SHORT, sync_every=5, outer_lr=0.9, outer_momentum=0.3)
"""The best of a tuning seed in rounds of five and ten, nearer to a plain average."""

FOUR_OF_EIGHT = replace(FOUR_SHORT, batch=32)
EIGHT_OF_EIGHT = replace(EIGHT_SHORT, batch=64)
"""As many samples in each group as in two groups: more groups are more samples in a step."""

DATA_PARALLEL_32 = replace(DATA_PARALLEL_MUON, batch=32)
DATA_PARALLEL_64 = replace(DATA_PARALLEL_MUON, batch=64)
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
CHANGING = replace(EIGHT_RADIAL, away=4, early=5)
CHANGING_DONATED = replace(CHANGING, heal_inner_state="donor")

CHANGING_OF_EIGHT = replace(EIGHT_OF_EIGHT, away=4, merge="rda", outer_lr=0.45)
SIX_OF_EIGHT = replace(CHANGING_OF_EIGHT, groups=6, batch=48, away=0)

CONSTANT_BATCH = replace(DATA_PARALLEL_MUON, batch=12)
CHANGING_BATCH = replace(CONSTANT_BATCH, batches=(16, 8, 8, 16))
"""Data parallel with the batches of six groups, and of eight, four and eight."""

SIX_OF_TWO = replace(EIGHT_SHORT, groups=6, batch=12)
EIGHT_FOUR_EIGHT = replace(EIGHT_SHORT, away=4)
"""As many samples in all as the six, averaged plainly, at the rate of four and eight groups."""

EQUAL = replace(TWO_MUON, groups=3, batch=24, sync_every=20)
UNEQUAL = replace(EQUAL, sync_every=30, steps=2700, step_times=(1.0, 1.5, 3.0))
"""As many rounds and samples as the equal ones."""


HELD_OUT = {
    name: replace(cell, curve=150)
    for name, cell in {
        "data parallel": DATA_PARALLEL_MUON,
        "1 group": replace(TWO_MUON, groups=1),
        "2 groups": TWO_SHORT,
        "4 groups": FOUR_SHORT,
        "8 groups": EIGHT_SHORT,
    }.items()
}
"""The lines of the picture of held-out loss against tokens: H = 30, several groups with short
rounds first. 150 steps are whole rounds in each."""


@dataclass(frozen=True)
class Arm:
    """What the study makes a claim of.

    Attributes:
        name: In the table and in the picture.
        cell: Its training.
        base: The training that it is compared with, seed by seed.
        against: The name of that.
    """

    name: str
    cell: Cell
    base: Cell = DATA_PARALLEL_MUON
    against: str = "data parallel"


FIRST_ARMS = (
    Arm("data parallel", DATA_PARALLEL_MUON, DATA_PARALLEL_MUON, "-"),
    Arm("2 groups, H = 30, warm-up", TWO_SHORT),
    Arm("2 groups, H = 15, warm-up", replace(TWO_SHORT, sync_every=15)),
    Arm("2 groups, H = 15", replace(TWO_MUON, sync_every=15)),
    Arm("2 groups, H = 30, momentum at once", TWO_SHORT_ROUNDS),
    Arm(
        "2 groups, H = 30, the quickstart",
        QUICKSTART,
        DATA_PARALLEL_COMPOSER,
        "data parallel, its rate",
    ),
    Arm("2 groups, H = 30", TWO_MUON),
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
    Arm("8 groups, H = 30, warm-up", replace(EIGHT_MUON, early=5)),
    Arm("8 groups, H = 30, warm-up, rda", replace(EIGHT_RADIAL, early=5)),
    Arm("8 groups, H = 30, warm-up, rda, outer lr 0.7", replace(EIGHT_LONG_STEPS, early=5)),
    Arm("data parallel, AdamW", DATA_PARALLEL),
    Arm(
        "8 groups, H = 30, warm-up, AdamW",
        replace(TWO, groups=8, early=5),
        DATA_PARALLEL,
        "data parallel, AdamW",
    ),
)

MANY_ARMS = (
    Arm("4 groups, H = 30, warm-up, inner lr 0.012", FOUR_SHORT),
    Arm("8 groups, H = 30, warm-up, inner lr 0.012", EIGHT_SHORT),
    Arm("4 groups, H = 10, warm-up, inner lr 0.012", replace(FOUR_SHORT, sync_every=10)),
    Arm("8 groups, H = 10, warm-up, inner lr 0.012", replace(EIGHT_SHORT, sync_every=10)),
    Arm("4 groups, H = 5, outer 0.9 and 0.3, inner lr 0.012", FOUR_OFTEN),
    Arm("data parallel, batch 32", DATA_PARALLEL_32, DATA_PARALLEL_32, "-"),
    Arm("4 groups of 8 samples, warm-up", FOUR_OF_EIGHT, DATA_PARALLEL_32, "same batch"),
    Arm("data parallel, batch 64", DATA_PARALLEL_64, DATA_PARALLEL_64, "-"),
    Arm("8 groups of 8 samples, warm-up", EIGHT_OF_EIGHT, DATA_PARALLEL_64, "same batch"),
)

THIRD_ARMS = (
    Arm("2 groups, int8", replace(TWO_MUON, wire_format="int8"), TWO_MUON, "2 groups, H = 30"),
    Arm("2 groups, H = 32", WHOLE, WHOLE, "-"),
    Arm("4 fragments, H = 32", FRAGMENTS, WHOLE, "2 groups, H = 32"),
    Arm("4 fragments, delay 2, H = 32", DELAYED, WHOLE, "2 groups, H = 32"),
)

BITS_ARMS = tuple(
    Arm(name.format(bits), replace(base, wire_format=wire_format), base, against)
    for name, base, against in (
        ("2 groups, {}", TWO_MUON, "2 groups, H = 30"),
        ("2 groups, {}, AdamW", TWO, "2 groups, H = 30, AdamW"),
        ("4 groups, {}, warm-up", FOUR_SHORT, "4 groups, float32"),
    )
    for bits, wire_format in (("fp4", "fp4"), ("2 bits", "2bit"))
)

FOURTH_ARMS = (
    Arm("6 groups of 2 samples, warm-up, rda", SIX_SHORT, SIX_SHORT, "-"),
    Arm(
        "8, 4 and 8 groups, warm-up, rda",
        CHANGING,
        SIX_SHORT,
        "6 groups, warm-up",
    ),
    Arm(
        "8, 4 and 8 groups, warm-up, rda, donor's inner state",
        CHANGING_DONATED,
        SIX_SHORT,
        "6 groups, warm-up",
    ),
    Arm("6 groups of 2 samples, warm-up, inner lr 0.012", SIX_OF_TWO, SIX_OF_TWO, "-"),
    Arm(
        "8, 4 and 8 groups, warm-up, inner lr 0.012",
        EIGHT_FOUR_EIGHT,
        SIX_OF_TWO,
        "6 groups, inner lr 0.012",
    ),
    Arm("6 groups of 8 samples, warm-up, rda", SIX_OF_EIGHT, SIX_OF_EIGHT, "-"),
    Arm(
        "8, 4 and 8 groups of 8 samples, warm-up, rda",
        CHANGING_OF_EIGHT,
        SIX_OF_EIGHT,
        "6 groups of 8 samples",
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

ARMS = (
    *FIRST_ARMS,
    *LONG_ARMS,
    *SECOND_ARMS,
    *MANY_ARMS,
    *THIRD_ARMS,
    *BITS_ARMS,
    *FOURTH_ARMS,
    *LAST_ARMS,
)

SHOWN = (
    "data parallel",
    "2 groups, H = 30, the quickstart",
    "2 groups, H = 30, warm-up",
    "2 groups, H = 30, warm-up, 3,600 steps",
    "4 groups, H = 30, warm-up, inner lr 0.012",
    "8 groups, H = 30, warm-up, inner lr 0.012",
    "8 groups, H = 10, warm-up, inner lr 0.012",
    "4 groups, H = 5, outer 0.9 and 0.3, inner lr 0.012",
    "4 groups of 8 samples, warm-up",
)
"""What docs/learning.md has; claims.md has all of them."""

SENT = {
    2: {
        "H = 30, fp4": replace(TWO_MUON, wire_format="fp4"),
        "H = 30, int8": replace(TWO_MUON, wire_format="int8"),
        "H = 30": TWO_MUON,
        "H = 30, warm-up": TWO_SHORT,
        "H = 15, warm-up": replace(TWO_SHORT, sync_every=15),
    },
    4: {
        "H = 30": FOUR_MUON,
        "H = 30, warm-up": FOUR_SHORT,
        "H = 15, warm-up": replace(FOUR_SHORT, sync_every=15),
        "H = 10, warm-up": replace(FOUR_SHORT, sync_every=10),
    },
    8: {
        "H = 30": EIGHT_MUON,
        "H = 30, warm-up": EIGHT_SHORT,
        "H = 15, warm-up": replace(EIGHT_SHORT, sync_every=15),
        "H = 10, warm-up": replace(EIGHT_SHORT, sync_every=10),
    },
}
"""The points of the picture of loss against bytes, by the number of groups. Those that have not
been trained are left out. All have as many samples as ``DATA_PARALLEL_MUON``, in the same order."""

CURVES = {
    "data parallel": DATA_PARALLEL_MUON,
    "healthy: 8 groups, 0.7 / 0.5": EIGHT_SHORT,
    "sick: 8 groups, 0.8 / 0.9, too much momentum for 110 outer steps": replace(
        EIGHT_SHORT, outer_lr=0.8, outer_momentum=0.9
    ),
}
"""The curves of the picture of a healthy and a sick outer loop, on the first tuning seed."""
