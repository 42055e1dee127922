"""Whether training goes on while a sync is under way: rounds beside the same inner steps alone.

    python benchmarks/overlap.py [--quick] [--json OUT] [--device cuda] [--dtype bfloat16]
                                 [--params 25e6] [--sync-every 50] [--fragment-sync-delay 4]

Two replica groups of one process each on this machine, over gloo and loopback, that train a
multilayer perceptron. In one run, taking turns, the slower group of each turn counting:

* alone: as many inner steps as a round has, without any communication;
* vanilla: a round whose sync is waited for;
* overlapped: a round with ``fragment_sync_delay`` steps between sending and the outer step.

On a device the profiler also watches one overlapped round: for how much of the time between the
sending and the outer step kernels ran, beside how much of the time they run in steps alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from groups import run_groups, settle
from results import command_line, count, report
from torch import nn
from torch.profiler import ProfilerActivity, profile

from composer_replication import DiLoCo
from composer_replication.replica.factory import make_manager

QUICK = {"params": 2_000_000, "turns": 2, "sync_every": 20}
LAYERS = 4

Interval = tuple[float, float]


class Training:
    """A model, its data and its AdamW, the same in every group."""

    def __init__(self, params: int, batch: int, device: str, dtype: str) -> None:
        torch.manual_seed(0)
        width = max(1, round((params / LAYERS) ** 0.5))
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to(device=device, dtype=getattr(torch, dtype))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._batch = torch.randn(batch, width, device=device, dtype=getattr(torch, dtype))

    def steps(self, count: int) -> float:
        """Take inner steps; the seconds until the device is done."""
        settle()
        began = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            (self.model(self._batch) - self._batch).square().mean().backward()
            self.optimizer.step()
        settle()
        return time.perf_counter() - began


def measure(
    arguments: argparse.Namespace, rank: int, addresses: Sequence[str], barrier: Any, out: Any
) -> None:
    """One replica group: the seconds of each turn."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.groups))
    managers = [
        make_manager(
            replica_id=rank,
            lighthouse_addr=address,
            min_replica_size=arguments.groups,
            token="local",
        )
        for address in addresses
    ]
    of_model = (arguments.params, arguments.batch, arguments.device, arguments.dtype)
    trainings = {name: Training(*of_model) for name in ("vanilla", "overlapped")}
    delay = arguments.fragment_sync_delay
    vanilla, overlapped = (
        DiLoCo(
            manager,
            training.model,
            training.optimizer,
            sync_every=arguments.sync_every,
            schedule=[],
            fragment_sync_delay=delay if name == "overlapped" else 0,
            fragment_update_alpha=0.5 if name == "overlapped" else 0.0,
            num_replicas=arguments.groups,
        )
        for manager, (name, training) in zip(managers, trainings.items(), strict=True)
    )
    taken: dict[str, list[float]] = {"alone": [], "vanilla": [], "overlapped": []}

    def turn(diloco: DiLoCo, name: str, *, counts: bool = True) -> float:
        diloco.counts_steps = counts
        barrier.wait()
        return trainings[name].steps(arguments.sync_every)

    with vanilla, overlapped:
        for repetition in range(arguments.turns + 1):
            found = {
                "alone": turn(vanilla, "vanilla", counts=False),
                "vanilla": turn(vanilla, "vanilla"),
                "overlapped": turn(overlapped, "overlapped"),
            }
            for name, seconds in found.items():
                if repetition:  # the first one allocates and connects
                    taken[name].append(seconds)
        if arguments.device != "cpu":
            taken |= watch(lambda: turn(vanilla, "vanilla", counts=False), "busy alone")
            taken |= watch(lambda: turn(overlapped, "overlapped"), "busy in a sync")
    out.put(taken)
    barrier.wait()
    for manager in managers:
        manager.shutdown()


def watch(call: Any, name: str) -> dict[str, list[float]]:
    """The part of the time in which the device computes, by the profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
    events = profiler.events() or []
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name != "CPU"
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    ]
    ranges = {
        event.name: (event.time_range.start, event.time_range.end)
        for event in events
        if event.name.startswith("torchft::local_sgd::") and event.device_type.name == "CPU"
    }
    if "torchft::local_sgd::perform_sync" in ranges:
        within = (
            ranges["torchft::local_sgd::prepare_sync"][1],
            ranges["torchft::local_sgd::perform_sync"][0],
        )
    else:
        within = (min(start for start, _ in kernels), max(stop for _, stop in kernels))
    return {name: [covered(kernels, within)]}


def covered(intervals: Sequence[Interval], within: Interval) -> float:
    """The part of an interval that others cover."""
    start, stop = within
    total, reached = 0.0, start
    for first, last in sorted(intervals):
        first, last = max(first, reached), min(last, stop)
        if last > first:
            total, reached = total + last - first, last
    return total / (stop - start)


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="a small model, two turns, H = 20")
    parser.add_argument("--params", type=count, default=25_000_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--sync-every", type=int, default=50)
    parser.add_argument("--fragment-sync-delay", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    taken = run_groups(measure, arguments, lighthouses=2)
    steps_ms = [1000 * seconds / arguments.sync_every for seconds in taken["alone"]]
    rows = {
        f"{name} / alone": [a / b for a, b in zip(taken[name], taken["alone"], strict=True)]
        for name in ("vanilla", "overlapped")
    } | {"an inner step alone, ms": steps_ms}
    rows |= {name: values for name, values in taken.items() if name.startswith("busy")}
    title = (
        f"{arguments.groups} groups, {arguments.params:,} parameters, H = {arguments.sync_every}, "
        f"fragment_sync_delay={arguments.fragment_sync_delay}, {arguments.device}"
    )
    report(title, rows, arguments)


if __name__ == "__main__":
    main()
