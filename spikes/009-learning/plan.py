"""Which trainings the study consists of, in the order in which they are run.

A stage's settings were chosen after the stages before it; what each is for is beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from arms import (
    BITS_ARMS,
    CHANGING_BATCH,
    CHANGING_DONATED,
    CHANGING_OF_EIGHT,
    CONSTANT_BATCH,
    DATA_PARALLEL,
    DATA_PARALLEL_32,
    DATA_PARALLEL_64,
    DATA_PARALLEL_COMPOSER,
    DATA_PARALLEL_LONG,
    DATA_PARALLEL_MUON,
    EIGHT_MUON,
    EIGHT_OF_EIGHT,
    EIGHT_SHORT,
    FIRST_ARMS,
    FOUR_MUON,
    FOUR_OF_EIGHT,
    FOUR_OFTEN,
    FOUR_SHORT,
    FOURTH_ARMS,
    HELD_OUT,
    LAST_ARMS,
    LONG_ARMS,
    MANY_ARMS,
    QUICKSTART,
    SECOND_ARMS,
    SIX_OF_EIGHT,
    SIX_OF_TWO,
    THIRD_ARMS,
    TWO,
    TWO_LONG,
    TWO_MUON,
    TWO_SHORT,
    TWO_SHORT_ROUNDS,
)
from cells import CLAIM_SEEDS, TUNING_SEEDS, Cell


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
        for cell in (DATA_PARALLEL_COMPOSER, QUICKSTART, TWO_SHORT_ROUNDS):
            yield cell.with_seed(seed)


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


def _eight_rates_look() -> Iterator[Cell]:
    """Eight groups of two samples: other inner steps, and more outer momentum."""
    eight = replace(EIGHT_MUON, early=5)
    yield replace(eight, lr=5.6e-3)
    yield replace(eight, lr=5.6e-3, outer_lr=0.8, outer_momentum=0.7)
    yield replace(eight, lr=1.2e-2)
    yield replace(eight, outer_lr=0.8, outer_momentum=0.7)
    yield replace(eight, lr=1.6e-2)
    yield replace(FOUR_MUON, early=5, lr=1.2e-2)
    yield replace(FOUR_MUON, early=5)


def _published_look() -> Iterator[Cell]:
    """Eight and four groups with the outer settings of arXiv 2503.09799."""
    yield replace(EIGHT_SHORT, outer_lr=0.8, outer_momentum=0.9)
    yield replace(FOUR_SHORT, outer_lr=0.6, outer_momentum=0.9)


def _final_lr_look() -> Iterator[Cell]:
    """Whether a learning rate that ends at 0 narrows the gap: groups differ less at small steps."""
    yield replace(EIGHT_MUON, early=5, final_lr=0.0)


def _groups_of_eight_look() -> Iterator[Cell]:
    """Four and eight groups that have 8 samples each, as two have, and data parallel's rates."""
    yield replace(EIGHT_OF_EIGHT, lr=8e-3)
    yield DATA_PARALLEL_64
    yield replace(FOUR_OF_EIGHT, lr=8e-3)


def _many_groups() -> Iterator[Cell]:
    """Four and eight groups at their own inner learning rate, and with 8 samples in each."""
    first, second = CLAIM_SEEDS[:2]
    for cell in (EIGHT_OF_EIGHT, DATA_PARALLEL_64, FOUR_SHORT):
        yield cell.with_seed(first)
    yield FOUR_SHORT.with_seed(second)
    for cell in (EIGHT_SHORT, FOUR_OF_EIGHT, DATA_PARALLEL_32):
        yield cell.with_seed(first)
    for cell in (EIGHT_SHORT, FOUR_OF_EIGHT, DATA_PARALLEL_32, EIGHT_OF_EIGHT, DATA_PARALLEL_64):
        yield cell.with_seed(second)


def _long() -> Iterator[Cell]:
    """Twice as many steps, near the length of the published fit: two groups first."""
    for arms in (LONG_ARMS[:2], LONG_ARMS[2:4]):
        for seed, arm in product(CLAIM_SEEDS[:5], arms):
            yield arm.cell.with_seed(seed)


def _changing_groups() -> Iterator[Cell]:
    """Groups that come and go, with a warm-up as it is recommended, on two further seeds."""
    for seed, arm in product(CLAIM_SEEDS[1:3], FOURTH_ARMS[:2]):
        yield arm.cell.with_seed(seed)


def _donated() -> Iterator[Cell]:
    """Whether joiners do better with the inner state of a group that has trained."""
    for seed in CLAIM_SEEDS[:2]:
        yield CHANGING_DONATED.with_seed(seed)


def _four_look() -> Iterator[Cell]:
    """What brings four groups closer to data parallel in rounds of ten, on a tuning seed."""
    ten = replace(FOUR_SHORT, sync_every=10)
    yield ten
    yield replace(ten, momentum=0.98)
    yield replace(ten, sync_every=5)
    yield replace(ten, outer_lr=0.9, outer_momentum=0.3)
    yield replace(ten, lr=1.6e-2)
    yield replace(ten, beta2=0.98)


def _four_outer_look() -> Iterator[Cell]:
    """The outer numbers towards the plain average did best: with what else was better, too."""
    ten = replace(FOUR_SHORT, sync_every=10, outer_lr=0.9, outer_momentum=0.3)
    yield replace(ten, lr=1.6e-2)
    yield replace(ten, sync_every=5)
    yield replace(ten, outer_lr=1.0, outer_momentum=0.0)
    yield replace(ten, sync_every=5, lr=1.6e-2)


def _four_often() -> Iterator[Cell]:
    """What did best in these looks, on the first five seeds of the claims."""
    for seed in CLAIM_SEEDS[:5]:
        yield FOUR_OFTEN.with_seed(seed)


def _six_groups() -> Iterator[Cell]:
    """As many samples as eight, four and eight groups, which the other study trains."""
    for seed in CLAIM_SEEDS[:5]:
        yield SIX_OF_TWO.with_seed(seed)


def _changing_groups_of_eight() -> Iterator[Cell]:
    """Groups that come and go, with 8 samples in each."""
    yield CHANGING_OF_EIGHT.with_seed(CLAIM_SEEDS[0])
    yield SIX_OF_EIGHT.with_seed(CLAIM_SEEDS[0])


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


def _bits() -> Iterator[Cell]:
    """Two bits beside fp4 and float32: Muon with two groups on five seeds, the others on three."""
    for seed in CLAIM_SEEDS[:3]:
        for arm in BITS_ARMS:
            yield arm.base.with_seed(seed)
            yield arm.cell.with_seed(seed)
    for seed in CLAIM_SEEDS[3:5]:
        for arm in BITS_ARMS[:2]:
            yield arm.cell.with_seed(seed)


def _held_out() -> Iterator[Cell]:
    """Held-out loss along the run, for a picture."""
    for cell in HELD_OUT.values():
        yield cell.with_seed(CLAIM_SEEDS[0])


def _claims() -> Iterator[Cell]:
    """All arms, one seed of each before the rest: whatever has been run can be compared."""
    rest = MANY_ARMS + LONG_ARMS + LAST_ARMS
    for seeds in (CLAIM_SEEDS[:1], CLAIM_SEEDS[1:2], CLAIM_SEEDS[2:3], CLAIM_SEEDS[3:]):
        for arms in (FIRST_ARMS, THIRD_ARMS, SECOND_ARMS, FOURTH_ARMS, rest):
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
    "eight rates look": _eight_rates_look,
    "published look": _published_look,
    "final lr look": _final_lr_look,
    "groups of eight look": _groups_of_eight_look,
    "many groups": _many_groups,
    "long": _long,
    "changing groups": _changing_groups,
    "four look": _four_look,
    "four outer look": _four_outer_look,
    "four often": _four_often,
    "six groups": _six_groups,
    "changing groups of eight": _changing_groups_of_eight,
    "changing batch": _changing_batch,
    "donated": _donated,
    "eleven seeds": _eleven_seeds,
    "bits": _bits,
    "held out": _held_out,
    "claims": _claims,
}


def cells(stage: str | None = None) -> Iterator[Cell]:
    """The trainings of a stage, or of all of them."""
    for name, make in STAGES.items():
        if stage in (None, name):
            yield from make()


assert Cell().seed == TUNING_SEEDS[0]
