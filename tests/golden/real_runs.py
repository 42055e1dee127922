"""Golden runs of two real groups: processes, a lighthouse, gloo; alone and with DDP inside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from golden.runs import SAMPLES, STEPS, Scripted, scripted_step, seeds_of
from integration.replicas import Group, run_groups

from composer_replication import DiLoCo
from composer_replication.replica.process_group import host_store

RANKS = 2
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9, "sync_buffers": "none"}
SETTINGS: dict[str, dict[str, Any]] = {
    "two real groups, 3 fragments, delay 1": {"num_fragments": 3, "fragment_sync_delay": 1},
    "two real groups, int8, by samples": {"wire_format": "int8", "weight_by": "samples"},
}


def train_group(group: Group, name: str) -> tuple[str, int]:
    """One group of one rank."""
    model = Scripted()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    shared: dict[str, Any] = {"num_replicas": group.num_replicas, **OUTER}
    with (
        group.manager() as manager,
        DiLoCo(manager, model, inner, None, 6, **shared, **SETTINGS[name]) as diloco,
    ):
        for step in range(STEPS):
            diloco.count_samples(SAMPLES[group.replica_id])
            scripted_step(model, inner, group.replica_id, step)
        diloco.final_sync()
        return diloco.global_digest(), diloco.outer_step


def train_rank(process: Group, folder: str) -> tuple[str, int]:
    """One of two ranks of a group under DDP; each has gradients of its own."""
    number, rank = divmod(process.replica_id, RANKS)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group_{number}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    store = host_store("localhost") if rank == 0 else None
    address: list[Any] = [(store.host, store.port) if store else None]
    dist.broadcast_object_list(address, src=0)
    group = Group(number, process.num_replicas // RANKS, process.lighthouse_addr, process.signal)
    model = Scripted()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    host, port = address[0]
    shared: dict[str, Any] = {"num_replicas": group.num_replicas, **OUTER}
    with (
        group.manager(rank=rank, world_size=RANKS, store_addr=host, store_port=port) as manager,
        DiLoCo(manager, model, inner, None, 6, ranks=dist.group.WORLD, **shared) as diloco,
    ):
        for step in range(STEPS):
            inner.zero_grad()
            wrapped(seeds_of(model, process.replica_id, step)).backward()
            inner.step()
        diloco.final_sync()
        return diloco.global_digest(), diloco.outer_step


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
