"""The study of what ships: the order of its trainings, and the report.

    python spikes/009-learning/defaults.py   # writes defaults-so-far.md from defaults.jsonl

``defaults.md`` has the question and the design.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from candidates import (
    AS_SHIPPED,
    CHOSEN,
    JOBS,
    NAMES,
    OUTSIDE,
    PLAIN,
    RATES,
    SEEDS,
    Job,
    bits_of,
    candidates,
    data_parallel,
    reference,
)
from cells import Cell
from equal_bytes import ARM_SEEDS, GO_ON, arms_of, equal_bytes
from lines import DEFAULTS, RESULTS, Lines, read
from paired import Difference, compare

LEADERS = 2
"""How many candidates are trained in the expensive jobs before all others, beside PLAIN."""

FINALISTS = 4
HOURS = 80.0
"""Of a processor, at most, for the jobs. The arms at equal bytes are not among them."""


# ---- the order of the trainings ----------------------------------------------------------------


def wanted(done: Lines, others: Lines = MappingProxyType({})) -> Iterator[Cell]:
    """What is still to be trained, the most informative for its cost first.

    Candidates of a job are known once its reference is, and finalists once all jobs are done.

    Args:
        done: The results of this study.
        others: Those of the study of learning, which has some of the arms.
    """
    arms = {cell for groups in (4, 8) for cell in arms_of(groups, ARM_SEEDS)}
    is_over = _hours(done, arms) >= HOURS
    known = {**done, **others}
    for cell in _in_order(known):
        if cell.key not in known and not (is_over and cell not in arms):
            yield cell


def _in_order(done: Lines) -> Iterator[Cell]:
    by_cost = sorted(JOBS, key=lambda job: job.cost)
    yield from _jobs(by_cost[:9], done)
    yield from _jobs(by_cost[9:-2], done, ["0.7 / 0.5, 60 short"])
    yield from arms_of(4, ARM_SEEDS[:1])
    yield from _jobs(by_cost[9:-2], done, _leaders(done))
    yield from _more_seeds(by_cost[:9], done, _leaders(done))
    yield from _jobs(OUTSIDE, done, [CHOSEN, PLAIN])
    measured = sorted([*AS_SHIPPED, *OUTSIDE], key=lambda job: job.cost)
    for job in measured[:-1]:
        yield from _more_seeds([job], done, [CHOSEN], ARM_SEEDS[1:])
    yield from _more_seeds(measured[-1:], done, [CHOSEN], ARM_SEEDS[1:])
    for seed, groups in product(ARM_SEEDS, (4, 8)):
        yield from arms_of(groups, (seed,), GO_ON)
    yield from _more_seeds(measured, done, [PLAIN], ARM_SEEDS[1:])
    yield from _jobs(by_cost[-2:], done, _leaders(done))
    yield from _jobs(by_cost, done, _not_beaten(done))
    yield from _more_seeds(by_cost, done, _finalists(done))


def _jobs(jobs: Iterable[Job], done: Lines, names: Iterable[str] = NAMES) -> Iterator[Cell]:
    for job in jobs:
        base = reference(job, done)
        if base is None:
            yield from data_parallel(job)
        else:
            named = candidates(job, base)
            yield from (named[name] for name in names)


def _more_seeds(
    jobs: Sequence[Job], done: Lines, names: Sequence[str], seeds: Iterable[int] = SEEDS[1:]
) -> Iterator[Cell]:
    """Trainings and references with the other seeds, of jobs whose learning rate is known."""
    for seed, job in product(seeds, jobs if names else ()):
        if base := reference(job, done):
            named = candidates(job, base)
            for cell in (base, *(named[name] for name in names)):
                yield cell.with_seed(seed)


def _leaders(done: Lines) -> list[str]:
    """The candidates that are trained first in the expensive jobs: the best so far, and PLAIN."""
    complete = _complete(done, NAMES)
    order = sorted(NAMES, key=lambda name: floor(each[name] for each in complete.values()))
    return list(dict.fromkeys([*order[:LEADERS], PLAIN]))


def _known(done: Lines) -> dict[str, list[float]]:
    """The gaps of each candidate with the first seed, of all jobs in which it was trained."""
    every = [gaps(job, done, SEEDS[:1]) for job in JOBS]
    return {name: [each[name] for each in every if name in each] for name in NAMES}


def furthest(done: Lines) -> list[str]:
    """The candidates that have been trained in most jobs."""
    known = _known(done)
    most = max(map(len, known.values()))
    return [name for name in NAMES if len(known[name]) == most]


def _not_beaten(done: Lines) -> list[str]:
    """Who may still have the lowest worst quarter; none before the leaders are through all jobs."""
    known = _known(done)
    through = [worst_quarter(own) for own in known.values() if len(own) == len(JOBS)]
    if len(through) < len(_leaders(done)):
        return []
    order = sorted(NAMES, key=lambda name: floor(known[name]))
    return [name for name in order if floor(known[name]) <= min(through)]


def _base_of(cell: Cell) -> str:
    """The arm of plain averaging at H = 30 that another arm is compared with."""
    if cell.batch == 32:
        return "8 samples a group"
    return "AdamW, H = 30" if cell.inner == "adamw" else "H = 30"


def _hours(done: Lines, arms: Container[Cell]) -> float:
    """Of a processor, that the jobs have taken so far."""
    lines = (line for line in done.values() if Cell(**line["cell"]) not in arms)
    return sum(line["cpu_seconds"] for line in lines) / 3600


# ---- what came out -----------------------------------------------------------------------------


def gaps(job: Job, done: Lines, seeds: Iterable[int] = SEEDS) -> dict[str, float]:
    """How far each candidate lies above data parallel, in percent, as a mean over the seeds."""
    base = reference(job, done)
    if base is None:
        return {}
    found = {}
    for name, cell in candidates(job, base).items():
        above = [
            100 * (bits_of(done, cell.with_seed(seed)) / bits_of(done, base.with_seed(seed)) - 1)
            for seed in seeds
        ]
        if known := [value for value in above if not math.isnan(value)]:
            found[name] = statistics.fmean(known)
    return found


def above(job: Job, done: Lines, name: str, without: Container[int] = ()) -> Difference | None:
    """How far a candidate lies above data parallel in a job, seed by seed.

    Args:
        job: The job.
        done: All results.
        name: Of the candidate.
        without: Seeds to leave out.
    """
    base = reference(job, done)
    if base is None:
        return None
    own, its = (_by_seed(done, cell) for cell in (candidates(job, base)[name], base))
    return compare({seed: own[seed] for seed in own if seed not in without}, its)


def _by_seed(done: Lines, cell: Cell) -> dict[int, float]:
    bits = {seed: bits_of(done, cell.with_seed(seed)) for seed in ARM_SEEDS}
    return {seed: value for seed, value in bits.items() if not math.isnan(value)}


def worst_quarter(values: Iterable[float]) -> float:
    """The mean of the largest quarter of the gaps, rounded up to whole jobs."""
    ordered = sorted(values, reverse=True)
    return statistics.fmean(ordered[: math.ceil(len(ordered) / 4)])


def floor(values: Iterable[float]) -> float:
    """What the worst quarter of all jobs cannot fall below, given the gaps in some of them."""
    ordered = sorted(values, reverse=True)[: math.ceil(len(JOBS) / 4)]
    return statistics.fmean(ordered) if ordered else math.nan


def _complete(done: Lines, names: Collection[str]) -> dict[Job, dict[str, float]]:
    """The jobs in which these candidates have been trained with the first seed, and their gaps."""
    found = {job: gaps(job, done, SEEDS[:1]) for job in JOBS}
    return {job: each for job, each in found.items() if each.keys() >= set(names)}


def _finalists(done: Lines) -> list[str]:
    """Those of the lowest worst quarters, and what ships; none before the others are beaten."""
    known, left = _known(done), _not_beaten(done)
    if not left or any(len(known[name]) < len(JOBS) for name in left):
        return []
    through = [name for name, own in known.items() if len(own) == len(JOBS)]
    order = sorted(through, key=lambda name: worst_quarter(known[name]))
    return list(dict.fromkeys([*order[:FINALISTS], PLAIN]))


def report(done: Lines, others: Lines = MappingProxyType({})) -> str:
    """The tables of what has been trained so far. Arguments as for ``wanted``."""
    arms = [*arms_of(4, ARM_SEEDS), *arms_of(8, ARM_SEEDS)]
    every = {job: gaps(job, done) for job in JOBS}
    begun = sum(1 for each in every.values() if each)
    rows = [
        "# What has been trained so far",
        "",
        "Written by `defaults.py` from `defaults.jsonl`. [The design](defaults.md) has the terms.",
        "",
        f"{begun} of {len(JOBS)} jobs have been begun, in {_hours(done, arms):.1f} of {HOURS:g} "
        "processor hours.",
        "",
        "## Candidates",
        "",
        "Percent above data parallel, of the first seed; a loss that is no number counts as inf.",
    ]
    for names in (NAMES, furthest(done)):
        jobs, found = summaries(done, names)
        if jobs:
            who = "all candidates" if names is NAMES else "these candidates"
            rows += ["", f"Over the {jobs} jobs in which {who} have been trained:", ""]
            rows += [
                "| candidate | worst quarter | of 1,000 steps and more | worst | median | mean |"
            ]
            rows += ["|---|---|---|---|---|---|"]
            for name, own in found.items():
                rows.append(f"| {name} | " + " | ".join(f"{each:+.2f}" for each in own) + " |")
    rows += ["", "## As it shipped, with momentum at once", "", shipped(done)]
    rows += ["", "## Jobs", "", "Percent above data parallel, as a mean over the seeds there are."]
    rows += ["", "| job | inner lr | data parallel | " + " | ".join(NAMES) + " |"]
    rows += ["|---" * (len(NAMES) + 3) + "|"]
    for job, own in every.items():
        if base := reference(job, done):
            edge = "" if base.lr == RATES[job.model, job.inner] else " (edge)"
            cells = " | ".join(f"{own[name]:+.2f}" if name in own else "-" for name in NAMES)
            rows.append(f"| {job.name} | {base.lr:g}{edge} | {bits_of(done, base):.3f} | {cells} |")
    return "\n".join([*rows, "", *_arms_table({**done, **others})]) + "\n"


class Summary(NamedTuple):
    """The gaps of a candidate with the first seed, in percent."""

    worst_quarter: float
    of_long: float
    worst: float
    median: float
    mean: float


def summaries(done: Lines, names: Collection[str]) -> tuple[int, dict[str, Summary]]:
    """In how many jobs all of these candidates have been trained, and what came out there."""
    complete = _complete(done, names)
    found = {}
    for name in names if complete else ():
        own = [each[name] for each in complete.values()]
        long = [each[name] for job, each in complete.items() if job.steps >= 1000]
        found[name] = Summary(
            worst_quarter(own),
            worst_quarter(long) if long else math.nan,
            max(own),
            statistics.median(own),
            statistics.fmean(own),
        )
    return len(complete), dict(sorted(found.items(), key=lambda item: item[1]))


def shipped(done: Lines) -> str:
    """The table of the jobs that what ships is measured in, and of those outside the study."""
    rows = [
        "| job | seeds | data parallel, bits | as it shipped |",
        "|---|---|---|---|",
    ]
    for job in (*AS_SHIPPED, *OUTSIDE):
        base, own = reference(job, done), above(job, done, CHOSEN)
        if base is None or own is None:
            continue
        bits = statistics.median(_by_seed(done, base).values())
        rows.append(f"| {job.name} | {own.seeds} | {bits:.3f} | {own} |")
    return "\n".join(rows)


def over_plain(done: Lines, groups: int, name: str) -> Difference | None:
    """How far an arm at equal bytes lies above plain averaging with H = 30, seed by seed."""
    arms = equal_bytes(groups)
    return compare(*(_by_seed(done, arms[each]) for each in (name, _base_of(arms[name]))))


def _arms_table(done: Lines) -> list[str]:
    rows = [
        "## At equal bytes",
        "",
        "16 samples a step in all, if an arm does not say otherwise.",
        "",
    ]
    rows += ["| groups | arm | seeds | bits per byte | over data parallel | over H = 30 |"]
    rows += ["|---|---|---|---|---|---|"]
    for groups in (4, 8):
        arms = equal_bytes(groups)
        bits = {name: _by_seed(done, cell) for name, cell in arms.items()}
        for name, own in bits.items():
            if not own:
                continue
            inner = ", AdamW" if arms[name].inner == "adamw" else ""
            batch = ", batch 32" if arms[name].batch == 32 else ""
            bases = (bits[f"data parallel{inner}{batch}"], bits[_base_of(arms[name])])
            differences = " | ".join(str(compare(own, base) or "-") for base in bases)
            mean = statistics.fmean(own.values())
            rows.append(f"| {groups} | {name} | {len(own)} | {mean:.3f} | {differences} |")
    return rows


def main() -> None:
    here = Path(__file__).with_name("defaults-so-far.md")
    here.write_text(report(read(DEFAULTS), read(RESULTS)))
    print(here.read_text())


if __name__ == "__main__":
    main()
