"""Whether what a group measures tells early if a training ends better than one group alone.

    python spikes/009-learning/verdict.py

Most trainings of the study of the warm-up have what their first group measured in its first 120
syncs, in version 0.2.0 and before: the mean's cosine with the momentum, the cosine between groups,
the norm of the mean over that of the groups, and the norms of the group's pseudo-gradient and of
the momentum. No later version measures the first and the third, and no later line has any.

A rule is a bound on one number of them. It is chosen in half of the jobs, and tried in the others;
so for many halves. Most trainings do end better, so who always says so is right in most. A rule's
figure is therefore the mean of two shares: how often it is right of those that do, and of those
that do not. 50 % is a guess.
"""

from __future__ import annotations

import random
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from lines import WARM, read, read_all
from warm import ALONE, BASE, CANDIDATES, EVERY_JOB, SEEDS, Known, base_of, gain, trainings

BETTER_ABOVE = 0.2
"""A training with this gain ended better than one group alone."""

HALVES = 200
FIRST_SYNCS = (20, 40, 60)

Syncs = Sequence[Sequence[float | None]]


class Training(NamedTuple):
    """A training of groups: of which job, what was measured, and whether it ended better."""

    job: str
    syncs: Syncs
    is_better: bool


class Rule(NamedTuple):
    """A training ends better if the number is on this side of the bound, or is not known."""

    bound: float
    is_above: bool


def all_trainings(known: Known) -> list[Training]:
    """The trainings that have a gain and measurements."""
    found = []
    for job, seed in product(EVERY_JOB, SEEDS):
        base = base_of(job, known)
        if base is None:
            continue
        named = trainings(job, base)
        lines = {cell: known.line(cell.with_seed(seed)) for cell in named.values()}
        alone, whole = lines[named[ALONE]], lines[named[BASE]]
        if alone is None or whole is None:
            continue
        # Candidates that differ later than a job ends are one training.
        for cell in dict.fromkeys(named[name] for name in CANDIDATES):
            line = lines[cell]
            if line is None or "syncs" not in line:
                continue
            own = gain(alone["bits"], whole["bits"], line["bits"])
            if own is not None:
                found.append(Training(job.name, line["syncs"], own > BETTER_ABOVE))
    return found


def numbers_of(syncs: Syncs, first: int) -> dict[str, float | None]:
    """What can be known after so many syncs, by name; None if it was never measured."""
    momentum, groups, ratio, norm, sum_norm = (
        [row[column] for row in syncs[:first] if row[column] is not None] for column in range(5)
    )
    half = len(norm) // 2
    return {
        "cosine with the momentum": _mean(momentum),
        "of the last ten": _mean(momentum[-10:]),
        "cosine between groups": _mean(groups),
        "between groups, of the last ten": _mean(groups[-10:]),
        "norm of the mean over the groups'": _mean(ratio),
        "its second half over its first": _mean(ratio[half:], _mean(ratio[:half])),
        "norm of the group's, second half over first": _mean(norm[half:], _mean(norm[:half])),
        "norm of the momentum over the group's": _mean(sum_norm[-10:], _mean(norm[-10:])),
    }


def _mean(values: Sequence[float | None], over: float | None = 1.0) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) / over if known and over else None


class Side(NamedTuple):
    """The numbers of the trainings that ended better, or of the others.

    Attributes:
        is_better: Which.
        known: Their numbers, sorted.
        unknown: How many have none.
    """

    is_better: bool
    known: Sequence[float]
    unknown: int

    def share_right(self, rule: Rule) -> float:
        """The share of these trainings of which a rule is right."""
        count = len(self.known) + self.unknown
        below = bisect_left(self.known, rule.bound)
        on_side = len(self.known) - below if rule.is_above else below
        says_better = self.unknown + on_side
        return (says_better if self.is_better else count - says_better) / count


def sides(numbers: Sequence[float | None], are_better: Sequence[bool]) -> list[Side]:
    """The trainings by how they ended."""
    found = []
    for is_better in set(are_better):
        own = [n for n, ended in zip(numbers, are_better, strict=True) if ended == is_better]
        known = sorted(number for number in own if number is not None)
        found.append(Side(is_better, known, len(own) - len(known)))
    return found


def best_rule(trained: Sequence[Side]) -> Rule:
    """The bound that is right most often, see the module."""
    known = sorted({number for side in trained for number in side.known})
    rules = [Rule(bound, above) for bound in known for above in (True, False)]
    never = Rule(float("-inf"), is_above=True)
    return max([never, *rules], key=lambda rule: right(rule, trained))


def right(rule: Rule, trained: Sequence[Side]) -> float:
    """The mean of the two shares in which a rule is right."""
    shares = [side.share_right(rule) for side in trained]
    return sum(shares) / len(shares)


def tried(trainings: Sequence[Training], numbers: Sequence[float | None]) -> Iterator[float]:
    """How often the rules of many halves of the jobs are right in the other half."""
    jobs = sorted({training.job for training in trainings})
    draw = random.Random(0)
    for _ in range(HALVES):
        half = set(draw.sample(jobs, len(jobs) // 2))
        parts: dict[bool, tuple[list[float | None], list[bool]]] = {True: ([], []), False: ([], [])}
        for training, number in zip(trainings, numbers, strict=True):
            part = parts[training.job in half]
            part[0].append(number)
            part[1].append(training.is_better)
        if all(len(set(are_better)) == 2 for _, are_better in parts.values()):
            yield right(best_rule(sides(*parts[True])), sides(*parts[False]))


def shares(trainings: Sequence[Training]) -> dict[str, list[float]]:
    """How often a rule on each number is right, after each of ``FIRST_SYNCS``."""
    by_first = [[numbers_of(each.syncs, first) for each in trainings] for first in FIRST_SYNCS]
    return {
        name: [
            statistics.fmean(tried(trainings, [own[name] for own in numbers]))
            for numbers in by_first
        ]
        for name in numbers_of((), 0)
    }


def report(known: Known) -> str:
    """How often a rule on each of the numbers is right."""
    every = all_trainings(known)
    not_better = sum(not training.is_better for training in every)
    rows = [f"{len(every)} trainings; {not_better} ended no better than one group alone", ""]
    rows += ["| number | " + " | ".join(f"{first} syncs" for first in FIRST_SYNCS) + " |"]
    rows += ["|---" * (len(FIRST_SYNCS) + 1) + "|"]
    for name, own in shares(every).items():
        rows.append(f"| {name} | " + " | ".join(f"{share:.0%}" for share in own) + " |")
    steady = Rule(0.1, is_above=True)
    last = [_mean([row[0] for row in each.syncs[-20:]]) for each in every]
    share = right(steady, sides(last, [each.is_better for each in every]))
    rows += ["", f"`steady`, by its last 20 syncs: {share:.0%}"]
    return "\n".join(rows)


if __name__ == "__main__":
    print(report(Known(read(WARM), read_all())))
