"""Golden runs of two real groups: processes, a lighthouse, gloo; alone and with DDP inside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from golden.runs import STEPS, Scripted, end, seeds_of, train
from harness.processes import Process, run_groups

RANKS = 2
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "sync_buffers": "none"}
SETTINGS: dict[str, dict[str, Any]] = {
    "two real groups, 3 fragments, delay 1": {"num_fragments": 3, "fragment_sync_delay": 1},
    "two real groups, int8, by samples": {"wire_format": "int8", "weight_by": "samples"},
}


def train_group(process: Process, name: str) -> tuple[str, int] | bytes:
    """One group of one rank."""
    with process.training(Scripted(), 6, outer=None, **OUTER, **SETTINGS[name]) as group:
        return train(group)


def train_rank(process: Process, folder: str) -> tuple[str, int]:
    """One of two ranks of a group under DDP; each has gradients of its own."""
    of_rank, model = process.of_rank(folder, RANKS), Scripted()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    settings = {"ranks": dist.group.WORLD, **OUTER}
    with of_rank.training(model, 6, outer=None, **settings) as group:
        for step in range(STEPS):
            group.inner.zero_grad()
            wrapped(seeds_of(model, process.replica_id, step)).backward()
            group.inner.step()
        return end(group)


def _two_groups(name: str) -> tuple[str, int]:
    first, second = run_groups(train_group, num_replicas=2, name=name)
    assert first == second
    return first


def _two_groups_of_ranks() -> tuple[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        ends = run_groups(train_rank, num_replicas=2 * RANKS, folder=folder)
    assert len(set(ends)) == 1, ends
    return ends[0]


REAL_RUNS: dict[str, Callable[[], tuple[str, int]]] = {
    **{name: partial(_two_groups, name) for name in SETTINGS},
    "two real groups of two ranks under DDP": _two_groups_of_ranks,
}
