"""The jobs of the study of what ships, and its candidates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from cells import Cell
from lines import Lines

SEEDS = (1, 2, 3)
"""The first one is for all candidates, the others are for the finalists."""

PLAIN = "0.7 / 0.5"
"""The candidate that shipped until the choice."""

CHOSEN = "0.7 / 0.5, 60 short if H >= 20"
"""The candidate that wins: see "The choice" in defaults.md."""

GRID = (0.5, 1.0, 2.0)
"""Data parallel's learning rates, in units of a kind's."""

SAMPLES = 8
"""In each group's batch. Data parallel has the batch of all groups."""


class Job(NamedTuple):
    """One of the jobs. Each two factors of three levels have all pairs of levels equally often."""

    model: str
    inner: str
    data: str
    groups: int
    sync_every: int
    steps: int
    rate: str

    @property
    def name(self) -> str:
        """How the tables name this job."""
        return (
            f"{self.model}, {self.inner}, {self.data}, k = {self.groups}, H = {self.sync_every}, "
            f"{self.steps:,} steps, {self.rate}"
        )

    @property
    def cost(self) -> float:
        """About, in steps of 16 samples of the smallest GPT."""
        sizes = {"gpt": 1.0, "deep": 2.2, "gru": 0.6, "cnn": 0.04, "convolutions": 0.5}
        size = sizes[self.model]
        return self.steps * self.groups / 2 * size


JOBS = (
    Job("gpt", "muon", "stdlib", 2, 10, 300, "constant"),
    Job("gpt", "muon", "headers", 4, 30, 1000, "cosine"),
    Job("gpt", "muon", "stdlib", 8, 100, 3000, "cosine"),
    Job("gpt", "adamw", "headers", 2, 10, 1000, "cosine"),
    Job("gpt", "adamw", "stdlib", 4, 30, 3000, "constant"),
    Job("gpt", "adamw", "headers", 8, 100, 300, "constant"),
    Job("deep", "muon", "headers", 2, 30, 300, "constant"),
    Job("deep", "muon", "headers", 4, 100, 1000, "constant"),
    Job("deep", "muon", "stdlib", 8, 10, 3000, "cosine"),
    Job("gru", "adamw", "headers", 2, 100, 3000, "cosine"),
    Job("gru", "adamw", "stdlib", 4, 10, 300, "cosine"),
    Job("gru", "adamw", "stdlib", 8, 30, 1000, "constant"),
    Job("cnn", "adamw", "digits", 2, 30, 3000, "constant"),
    Job("cnn", "adamw", "digits", 4, 100, 300, "cosine"),
    Job("cnn", "adamw", "digits", 8, 10, 1000, "constant"),
    Job("cnn", "muon", "digits", 2, 100, 1000, "cosine"),
    Job("cnn", "muon", "digits", 4, 10, 3000, "constant"),
    Job("cnn", "muon", "digits", 8, 30, 300, "cosine"),
)
"""Taguchi's L18: a factor of six levels (model and inner optimizer) and three of three levels.

Of its other two columns, whose third level is dealt to the first two, come the rate and the text.
"""

AS_SHIPPED = tuple(
    job for job in JOBS if job.groups <= 4 and job.sync_every <= 30 and job.steps >= 1000
)
"""The jobs that what ships is measured in, with all seeds."""

OUTSIDE = (
    Job("convolutions", "adamw", "docstrings", 2, 30, 1000, "cosine"),
    Job("convolutions", "adamw", "docstrings", 4, 30, 1000, "constant"),
)
"""A model and a text that the choice knows nothing of, trained after it."""

RATES = {
    ("gpt", "muon"): 1.2e-2,
    ("gpt", "adamw"): 5.6e-3,
    ("deep", "muon"): 1.2e-2,
    ("gru", "adamw"): 8e-3,
    ("cnn", "adamw"): 4e-3,
    ("cnn", "muon"): 8e-3,
    ("convolutions", "adamw"): 4e-3,
}


def data_parallel(job: Job) -> list[Cell]:
    """The reference at each learning rate."""
    base = Cell(
        model=job.model,
        inner=job.inner,
        data=job.data,
        batch=SAMPLES * job.groups,
        steps=job.steps,
        final_lr=1.0 if job.rate == "constant" else 0.1,
        seed=SEEDS[0],
    )
    return [replace(base, lr=RATES[job.model, job.inner] * factor) for factor in GRID]


def bits_of(done: Lines, cell: Cell) -> float:
    line = done.get(cell.key)
    return math.nan if line is None else line["bits"] if math.isfinite(line["bits"]) else math.inf


def reference(job: Job, done: Lines) -> Cell | None:
    """The best one, which has the inner learning rate of all candidates; None if not yet known."""
    tried = data_parallel(job)
    if any(cell.key not in done for cell in tried):
        return None
    return min(tried, key=lambda cell: bits_of(done, cell))


def candidates(job: Job, base: Cell) -> dict[str, Cell]:
    """What could ship, none of which knows how long the job is."""
    muon, k = job.inner == "muon", job.groups
    own = replace(base, groups=k, sync_every=job.sync_every, outer_momentum=0.5)
    rising = replace(own, ramp=10.0, outer_momentum=0.9)
    short, longer = (
        {"sync_every": job.sync_every // 5, "rounds": ((count + 1, job.sync_every),)}
        for count in (20, 60)
    )
    by_k = {2: (0.7, 0.5), 4: (0.8, 0.6), 8: (0.8, 0.7)}
    muloco = (1.0, 0.9) if k == 8 else (0.9, 0.8) if muon else (0.8, 0.9)
    return {
        "0.7 / 0.9": replace(own, outer_momentum=0.9),
        "0.7 / 0.5": own,
        "rising, c = 10": rising,
        "0.7 / 0.5, short first": replace(own, **short),
        "rising, c = 10, short first": replace(rising, **short),
        "by k": _outer(own, *by_k[k]),
        "rising, c = 30": replace(rising, ramp=30.0),
        "MuLoCo": _outer(own, *muloco),
        "SNOO": _outer(own, 0.8, 0.75),
        "plain mean": _outer(own, 1.0, 0.0),
        "0.8 / 0.6, short first": replace(_outer(own, 0.8, 0.6), **short),
        "0.7 / 0.5, 60 short": replace(own, **longer),
        CHOSEN: replace(own, **longer) if job.sync_every >= 20 else own,
    }


def _outer(cell: Cell, lr: float, momentum: float) -> Cell:
    return replace(cell, outer_lr=lr, outer_momentum=momentum)


NAMES = tuple(candidates(JOBS[0], Cell()))
