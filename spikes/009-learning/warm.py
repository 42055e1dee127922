"""The study of the outer optimizer's warm-up: its jobs, its candidates, their order, and the gain.

    python spikes/009-learning/study.py run --study warm --workers 1   # trains what is missing
    python spikes/009-learning/study.py run --study pictures           # five seeds, on one machine
    python spikes/009-learning/warm.py                                 # what came out so far

``warm.md`` has the question and the design.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from arms import DATA_PARALLEL_COMPOSER, QUICKSTART
from candidates import GRID, JOBS, OUTSIDE, SAMPLES, SEEDS, Job, data_parallel, reference
from cells import Cell
from lines import PICTURES, WARM, Lines, read, read_all
from paired import Difference, compare

HOURS = 25.0
"""Of a processor, at most, until one of the candidates is chosen."""

SHORT_ROUNDS, SHORT_BELOW = 60, 20
"""As in the package's settings when this was written."""

NUMBERS = (0.7, 0.5)
"""The outer learning rate and momentum that ship, after the warm-up."""
STRAIGHT = 60
"""The outer steps in which the numbers change from a plain average's to those that ship."""

BASE, ALONE, MOMENTUM_AT_ONCE = "data parallel", "one group alone", "0.7 / 0.5"
CHOSEN = "plain in the first 20"
"""The candidate that ships now: see "The choice" in warm.md."""
FINALIST = "plain in 20, 0.7 / 0.7 from 61"
"""The other one that is trained with three seeds in all jobs."""
SOONER = "plain in 10, 0.7 / 0.7 from 61"
BY_STEPS = "plain in the first 80 steps"
"""Inner steps: as many rounds as have them, and 20 at most, which it is in the rows."""
PLAIN_STEPS, PLAIN_ROUNDS = 80, 20

LONG = 60
"""Outer steps of a training that is not short."""

APART = 0.01
"""One group alone has to lie this far above data parallel, else noise decides what the gain is."""

OTHER_RATES = {f"{ALONE}, {factor:g} of the rate": factor for factor in GRID if factor != 1}


class Row(NamedTuple):
    """A training as somebody may begin it: a small byte GPT, AdamW, ``sync_every: 20``.

    If it comes ``after`` some steps, it starts from a model that was trained on another text.
    """

    groups: int
    steps: int
    lr: float
    after: int = 0

    @property
    def sync_every(self) -> int:
        """Inner steps in a round."""
        return 20

    @property
    def name(self) -> str:
        """How the table names it."""
        what = "small, fine-tuned" if self.after else "small"
        return f"{what}, k = {self.groups}, {self.steps:,} steps, lr {self.lr:g}"

    @property
    def base(self) -> Cell:
        """Data parallel."""
        return Cell(
            model="small",
            data="another manual" if self.after else "manual",
            batch=SAMPLES * self.groups,
            steps=self.steps,
            lr=self.lr,
            warmup=20,
            final_lr=0.0,
            beta2=0.999,
            seed=SEEDS[0],
            after=self.after,
        )


ROWS = (
    Row(2, 150, 2e-3),
    Row(2, 300, 2e-3),
    Row(2, 600, 3e-3),
    Row(4, 300, 2e-3),
    Row(2, 600, 1e-3),
    Row(2, 600, 5e-4),
    Row(2, 1200, 1.5e-3),
)
"""The first four were at or above one group alone as shipped, and the others were not."""

FINE_TUNED = (Row(2, 300, 5e-4, 1200), Row(4, 300, 5e-4, 1200), Row(2, 600, 1e-3, 1200))

_BY_COST = sorted(JOBS, key=lambda job: job.cost)
CHEAP = sorted(_BY_COST[:8], key=lambda job: job.model == "cnn")
"""The text first: the pictures' loss spreads by some percent from seed to seed."""

OTHERS = sorted([*_BY_COST[8:-2], *OUTSIDE], key=lambda job: job.cost)
MOST_EXPENSIVE = _BY_COST[-2:]
EVERY_JOB = (*ROWS, *FINE_TUNED, *CHEAP, *OTHERS, *MOST_EXPENSIVE)


OF_PICTURES = "cnn"
"""A model whose loss differs by some percent on another processor: all of its arms are trained."""

FIVE_SEEDS = (*SEEDS, 4, 5)
"""The seeds of the trainings on pictures, whose loss spreads by some percent from seed to seed."""


class Known(NamedTuple):
    """The results of this study, and of the first two, which have most of the references."""

    done: Lines
    others: Lines = MappingProxyType({})

    def line(self, cell: Cell) -> Mapping[str, Any] | None:
        """The result of a training; None if it has to be trained."""
        others = {} if cell.model == OF_PICTURES else self.others
        return self.done.get(cell.key, others.get(cell.key))


def results() -> Known:
    """All that was trained. In the jobs on pictures the lines of one machine count."""
    return Known({**read(WARM), **read(PICTURES)}, read_all())


def base_of(job: Job | Row, known: Known) -> Cell | None:
    """Data parallel at the rate that all trainings of the job have; None if not yet known."""
    return job.base if isinstance(job, Row) else reference(job, {**known.done, **known.others})


def outer_steps(steps: int, sync_every: int) -> int:
    """How many rounds a training of so many steps has, with the short ones that ship."""
    short = sync_every // 5 if sync_every >= SHORT_BELOW else sync_every
    if steps <= SHORT_ROUNDS * short:
        return steps // short
    return SHORT_ROUNDS + (steps - SHORT_ROUNDS * short) // sync_every


def candidates(base: Cell, groups: int, sync_every: int) -> dict[str, Cell]:
    """What ships, and what could: the outer learning rate and momentum by outer step.

    Args:
        base: Data parallel.
        groups: Number of replica groups.
        sync_every: The one setting that is given.
    """
    lr, momentum = NUMBERS
    own = replace(base, groups=groups, sync_every=sync_every, outer_lr=lr, outer_momentum=momentum)
    if sync_every >= SHORT_BELOW:
        own = replace(own, sync_every=sync_every // 5, rounds=((SHORT_ROUNDS + 1, sync_every),))
    plain = replace(own, outer_lr=1.0, outer_momentum=0.0)
    rounds = min(PLAIN_ROUNDS, math.ceil(PLAIN_STEPS / own.sync_every))
    later = ((61, 0.7, 0.7),) if outer_steps(base.steps, sync_every) > SHORT_ROUNDS else ()
    line = (
        (step + 1, 1 + (lr - 1) * step / STRAIGHT, momentum * step / STRAIGHT)
        for step in range(1, STRAIGHT + 1)
    )
    return {
        MOMENTUM_AT_ONCE: own,
        "plain in the first 20": replace(plain, outer=((21, *NUMBERS),)),
        FINALIST: replace(plain, outer=((21, *NUMBERS), *later)),
        SOONER: replace(plain, outer=((11, *NUMBERS), *later)),
        "a straight line over 60": replace(
            plain, outer=tuple((step, round(rate, 6), round(part, 6)) for step, rate, part in line)
        ),
        "plain in the first 10": replace(plain, outer=((11, *NUMBERS),)),
        "plain in the first 40": replace(plain, outer=((41, *NUMBERS),)),
        "plain in the first 60": replace(plain, outer=((61, *NUMBERS),)),
        BY_STEPS: replace(plain, outer=((rounds + 1, *NUMBERS),)),
    }


def trainings(job: Job | Row, base: Cell) -> dict[str, Cell]:
    """The references of a job, and its candidates."""
    alone = replace(base, alone_of=job.groups)
    return {BASE: base, ALONE: alone, **candidates(base, job.groups, job.sync_every)} | {
        name: replace(alone, lr=alone.lr * factor) for name, factor in OTHER_RATES.items()
    }


NAMES = tuple(name for name in trainings(ROWS[0], ROWS[0].base) if name not in OTHER_RATES)
CANDIDATES = NAMES[2:]


# ---- the order of the trainings ----------------------------------------------------------------


def wanted(done: Lines, others: Lines = MappingProxyType({})) -> Iterator[Cell]:
    """What is still to be trained, the most informative for its cost first.

    Args:
        done: The results of this study.
        others: Those of the first two, which have most of the references.
    """
    if sum(line["cpu_seconds"] for line in done.values()) >= HOURS * 3600:
        return
    known = Known(done, others)
    yield from dict.fromkeys(cell for cell in _in_order(known) if known.line(cell) is None)


def wanted_pictures(done: Lines, others: Lines = MappingProxyType({})) -> Iterator[Cell]:
    """What ships and the finalist with five seeds, in the jobs on pictures in which they differ.

    The references are trained beside them: one machine gives all of these losses.
    """
    known = Known(done)
    for seed, job in product(FIVE_SEEDS, JOBS):
        if job.model == OF_PICTURES and outer_steps(job.steps, job.sync_every) > SHORT_ROUNDS:
            base = base_of(job, Known(others))
            assert base is not None, "data parallel's rates are in defaults.jsonl"
            its = trainings(job, base)
            for name in (BASE, ALONE, MOMENTUM_AT_ONCE, CHOSEN, FINALIST):
                cell = its[name].with_seed(seed)
                if known.line(cell) is None:
                    yield cell


def _in_order(known: Known) -> Iterator[Cell]:
    first, more = SEEDS[:1], SEEDS[1:]
    yield from _of([*ROWS, *CHEAP], known, NAMES, first)
    yield from _of([*OTHERS], known, [ALONE], first)
    yield from _of([*FINE_TUNED], known, NAMES, first)
    yield from _of([*ROWS], known, NAMES, more)
    shipped = [BASE, ALONE, MOMENTUM_AT_ONCE, CHOSEN]
    yield from _of([*FINE_TUNED, *CHEAP], known, shipped, more)
    for job in OTHERS:
        yield from _of([job], known, shipped, SEEDS)
    yield from _of([*CHEAP, *OTHERS], known, [BY_STEPS], SEEDS)
    yield from _of([*CHEAP], known, [FINALIST], more)
    yield from _of([*OTHERS], known, [FINALIST], SEEDS)
    yield from _of([*OTHERS], known, NAMES, first)
    yield from _of([*CHEAP, *OTHERS], known, [*OTHER_RATES], first)
    yield from _of([*CHEAP], known, NAMES, more)
    yield from _of([*OTHERS], known, NAMES, more)
    yield from _of(MOST_EXPENSIVE, known, NAMES, first)


def _of(
    jobs: Iterable[Job | Row], known: Known, names: Iterable[str], seeds: Iterable[int]
) -> Iterator[Cell]:
    for seed, job in product(seeds, jobs):
        base = base_of(job, known)
        if base is None:
            assert isinstance(job, Job)  # that of a row is always known
            yield from data_parallel(job)
        else:
            its = trainings(job, base)
            yield from (its[name].with_seed(seed) for name in names)


# ---- what came out -----------------------------------------------------------------------------


def gain(alone: float, base: float, own: float) -> float | None:
    """1 if a training is as good as data parallel, 0 if it is as good as one group alone.

    Returns:
        None if one group alone is no worse than data parallel by ``APART``, or has diverged: then
        there is nothing to gain, or no scale for it.
    """
    if not APART <= alone / base - 1 < math.inf:
        return None
    return (alone - own) / (alone - base)


def losses(job: Job | Row, known: Known) -> dict[str, dict[int, float]]:
    """Held-out bits of each training that has been made, by seed; infinite if it diverged."""
    base = base_of(job, known)
    found = {}
    for name, cell in (trainings(job, base) if base else {}).items():
        lines = {seed: known.line(cell.with_seed(seed)) for seed in FIVE_SEEDS}
        bits = {seed: line["bits"] for seed, line in lines.items() if line is not None}
        found[name] = {seed: b if math.isfinite(b) else math.inf for seed, b in bits.items()}
    return found


def means(job: Job | Row, known: Known, names: Iterable[str] = NAMES) -> dict[str, float]:
    """The losses of the references and candidates named, over the seeds that all of them have."""
    bits, names = losses(job, known), [*names]
    seeds = seeds_of(bits, names)
    return {name: statistics.fmean(bits[name][seed] for seed in seeds) for name in names if seeds}


def seeds_of(bits: Mapping[str, Mapping[int, float]], names: Iterable[str] = NAMES) -> set[int]:
    """The seeds that all trainings of these names have."""
    return set.intersection(*(set(bits.get(name, ())) for name in names))


def gain_of(mean: Mapping[str, float], name: str) -> float | None:
    """The gain of a candidate, of what ``means`` has returned."""
    return gain(mean[ALONE], mean[BASE], mean[name])


def gains(known: Known) -> str:
    """What ships beside one group alone, in the trainings as somebody may begin them: a table."""
    rows = [
        "| groups, steps, rate | seeds | data parallel, bits | one alone | as it ships | gain |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        names = BASE, ALONE, CHOSEN
        mean = means(row, known, names)
        own = gain_of(mean, CHOSEN) if mean else None
        if own is not None:
            seeds = len(seeds_of(losses(row, known), names))
            bits = " | ".join(f"{mean[name]:.3f}" for name in (BASE, ALONE, CHOSEN))
            what = f"{row.groups}, {row.steps:,}, {row.lr:g}"
            rows.append(f"| {what} | {seeds} | {bits} | {own:.2f} |")
    return "\n".join(rows)


def gains_of(known: Known, name: str, jobs: Iterable[Job | Row] = EVERY_JOB) -> list[float]:
    """The gains of a candidate, the least first, in those jobs that have one of what ships too."""
    every = (means(job, known, {BASE, ALONE, CHOSEN, name}) for job in jobs)
    found = (gain_of(mean, name) for mean in every if mean)
    return sorted(value for value in found if value is not None)


def report(known: Known) -> str:
    """The gain of each candidate in each job, and its worst quarter, as a table.

    Where there is no gain, it has how far the candidate lies above one group alone, in percent.
    """
    rows = ["| job | data parallel | alone | other rates | " + " | ".join(CANDIDATES) + " |"]
    rows += ["|---" * (len(CANDIDATES) + 4) + "|"]
    found: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for job in EVERY_JOB:
        mean, bits = means(job, known), losses(job, known)
        if not mean:
            continue
        others = ", ".join(f"{bits[name][1]:.3f}" for name in OTHER_RATES if 1 in bits[name])
        row = f"| {job.name} | {mean[BASE]:.3f} | {mean[ALONE]:.3f} | {others or '-'} |"
        for name in CANDIDATES:
            own = gain_of(mean, name)
            if own is None:
                row += f" ({100 * (mean[name] / mean[ALONE] - 1):+.1f} %) |"
            else:
                row += f" {own:+.2f} |"
                found[name].append(own)
        rows.append(row)
    count = len(found[MOMENTUM_AT_ONCE])
    for which, summary in (("worst quarter", worst_quarter), ("median", statistics.median)):
        if count:
            numbers = " | ".join(f"{summary(found[name]):+.2f}" for name in CANDIDATES)
            rows.append(f"| {which} of {count} | | | | {numbers} |")
    return "\n".join(rows)


def worst_quarter(values: Sequence[float]) -> float:
    """The mean of the smallest quarter of the gains, rounded up to whole jobs."""
    return statistics.fmean(sorted(values)[: math.ceil(len(values) / 4)])


class Shipped(NamedTuple):
    """What ships in a job, over the seeds that it, momentum at once and both references have."""

    job: Job | Row
    gain: float
    at_once: float | None
    above_base: Difference
    above_at_once: Difference


def shipped(known: Known) -> Iterator[Shipped]:
    """What ships in each job that has a gain."""
    for job in EVERY_JOB:
        names = BASE, ALONE, MOMENTUM_AT_ONCE, CHOSEN
        mean, bits = means(job, known, names), losses(job, known)
        own = gain_of(mean, CHOSEN) if mean else None
        if own is None:
            continue
        seeds = seeds_of(bits, names)
        ours = {seed: bits[CHOSEN][seed] for seed in seeds}
        base, at_once = compare(ours, bits[BASE]), compare(ours, bits[MOMENTUM_AT_ONCE])
        assert base is not None and at_once is not None, "they have seeds in common"
        yield Shipped(job, own, gain_of(mean, MOMENTUM_AT_ONCE), base, at_once)


def report_of_shipped(known: Known) -> str:
    """What ships in each job, as a table, and its medians, as in ``warm.md``."""
    rows = [
        "| job | outer steps | seeds | gain | of momentum at once | above data parallel "
        "| above momentum at once |",
        "|---" * 7 + "|",
    ]
    found = [*shipped(known)]
    for job, own, at_once, base, other in found:
        syncs = outer_steps(job.steps, job.sync_every)
        rows.append(
            f"| {job.name} | {syncs} | {base.seeds} | {own:.2f} | {at_once:.2f} "
            f"| {base.mean:+.1f} % | {other} |"
        )
    long = [each for each in found if outer_steps(each.job.steps, each.job.sync_every) >= LONG]
    fresh = [each for each in long if each.job not in FINE_TUNED]
    for what, some in (("from a fresh model", fresh), ("from any model", long)):
        gains = sorted(each.gain for each in some)
        if gains:
            rows.append(
                f"\n{len(gains)} {what} with {LONG} outer steps or more: gain {gains[0]:.2f} to "
                f"{gains[-1]:.2f}, median {statistics.median(gains):.2f}"
            )
    for groups in sorted({each.job.groups for each in found}):
        above = [each.above_base.mean for each in found if each.job.groups == groups]
        rows.append(f"\n{groups} groups: {statistics.median(above):+.1f} % above data parallel")
    return "\n".join(rows)


def beside_what_ships(known: Known, candidate: str) -> str:
    """A candidate beside what ships, with a row for each job in which they differ: a table."""
    rows = [
        f"| job | seeds | gain as it ships | {candidate} | above what ships "
        "| above momentum at once |",
        "|---" * 6 + "|",
    ]
    shipping, others = [], []
    for job in EVERY_JOB:
        names = BASE, ALONE, MOMENTUM_AT_ONCE, CHOSEN, candidate
        mean, bits = means(job, known, names), losses(job, known)
        own, other = (gain_of(mean, name) if mean else None for name in (CHOSEN, candidate))
        if own is None or other is None:
            continue
        shipping.append(own)
        others.append(other)
        seeds = seeds_of(bits, names)
        theirs = {seed: bits[candidate][seed] for seed in seeds}
        above = (compare(theirs, bits[name]) for name in (CHOSEN, MOMENTUM_AT_ONCE))
        if theirs != {seed: bits[CHOSEN][seed] for seed in seeds}:
            differences = " | ".join(map(str, above))
            rows.append(f"| {job.name} | {len(seeds)} | {own:.2f} | {other:.2f} | {differences} |")
    for name, gains in ((CHOSEN, shipping), (candidate, others)):
        if gains:
            median, worst = statistics.median(gains), worst_quarter(gains)
            rows.append(
                f"\n{name}: {len(gains)} jobs, median {median:.2f}, worst quarter {worst:.2f}"
            )
    return "\n".join(rows)


def report_of_quickstart(known: Known) -> str:
    """The quickstart's training with what ships and by steps, above data parallel, as lines."""
    rounds = math.ceil(PLAIN_STEPS / QUICKSTART.sync_every)
    named = {CHOSEN: QUICKSTART, BY_STEPS: replace(QUICKSTART, outer=((rounds + 1, *NUMBERS),))}
    bits = {
        name: {
            seed: line["bits"] for seed in FIVE_SEEDS if (line := known.line(cell.with_seed(seed)))
        }
        for name, cell in {BASE: DATA_PARALLEL_COMPOSER, **named}.items()
    }
    rows = []
    for name in named:
        seeds = len(seeds_of(bits, (BASE, name)))
        rows.append(f"the quickstart, {name}: {compare(bits[name], bits[BASE])} in {seeds} seeds")
    beside = [
        f"{100 * (bits[BY_STEPS][seed] / bits[CHOSEN][seed] - 1):+.1f}"
        for seed in sorted(seeds_of(bits, named))
    ]
    rows.append(f"{BY_STEPS} beside {CHOSEN}, by seed: {', '.join(beside)} %")
    return "\n\n".join(rows)


def main() -> None:
    done = [*read(WARM).values(), *read(PICTURES).values()]
    hours = sum(line["cpu_seconds"] for line in done) / 3600
    print(f"{len(done)} trainings in {hours:.1f} of {HOURS:g} processor hours\n")
    known = results()
    print(f"{report(known)}\n\n{report_of_shipped(known)}")
    for name in (FINALIST, SOONER, BY_STEPS):
        print(f"\n{beside_what_ships(known, name)}")
    print(f"\n{report_of_quickstart(known)}")


if __name__ == "__main__":
    main()
