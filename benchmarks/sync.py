"""What one sync takes, beside one raw allreduce of the same bytes, and where the time goes.

    python benchmarks/sync.py [--quick] [--json OUT] [--params 100e6] [--tensors 147] [--groups 2]
                              [--wire-format int8] [--device cuda] [--dtype bfloat16]

Replica groups of one process each on this machine, over gloo and loopback; an inner step does
nothing, so that what is left is the sync. In one run, taking turns, the slowest process of each
repetition counting:

* raw: one gloo allreduce of one flat preallocated fp32 tensor;
* copy: how fast all processes together copy memory, which says what nine passes over the
  pseudo-gradient take; floor = raw + these;
* ours, and the phases of it: form, send (until the last byte is there), outer (outer step and the
  way back into the model), and the rest (quorum, vote);
* torchft: its own DiLoCo under the same manager.

On ``--device cuda`` the model is there and all else, messages too, in host memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from still import Still, build_model
from torch import nn
from torch.distributed import ReduceOp

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.wire_sizes import WIRE_FORMATS
from composer_replication.lighthouse import start_lighthouse

from composer_replication.replica import make_manager  # isort: skip


PASSES = 9
"""Over the bytes of the pseudo-gradient: form it (3), outer step (5), way back (1)."""

QUICK = {"params": 25_000_000, "repetitions": 5}


class Phases:
    """Seconds by phase of our sync, measured from outside."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Count the time inside to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + taken

    def watch(self, diloco: DiLoCo) -> None:
        """Measure the phases of every sync from now on."""
        for fragment in diloco._fragments:
            for phase, name, thing in (
                ("form", "_save_grads", fragment),
                ("send", "_average_grads", fragment),
                ("outer", "_set_grads", fragment),
                ("outer", "_merge_parameters", fragment),
                ("outer", "step", fragment.globals.optimizer),
            ):
                setattr(thing, name, self._timed(phase, getattr(thing, name)))
            fragment.perform_sync = self._timed("perform", fragment.perform_sync)

    def _timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.of(phase):
                return call(*arguments, **named)

        return timed


def measure(arguments: argparse.Namespace, rank: int, address: str, barrier: Any, out: Any) -> None:
    """One replica group: every method in turn, the seconds of each repetition."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.groups))
    manager = make_manager(
        replica_id=rank, lighthouse_addr=address, min_replica_size=arguments.groups, timeout=120.0
    )
    model = build_model(arguments.params, arguments.tensors, arguments.device, arguments.dtype)
    flat = torch.ones(arguments.params)
    other = torch.empty_like(flat)
    taken: dict[str, list[float]] = {}

    def repeat(name: str, call: Callable[[], Any]) -> None:
        barrier.wait()
        began = time.perf_counter()
        call()
        settle()
        taken.setdefault(name, []).append(time.perf_counter() - began)

    def raw() -> None:
        manager._pg.allreduce([flat], ReduceOp.SUM).wait()

    inner, phases = Still(model.parameters()), Phases()
    ours = DiLoCo(
        manager,
        model,
        inner,
        sync_every=1,
        num_replicas=arguments.groups,
        bucket_cap_mb=arguments.bucket_cap_mb,
        wire_format=arguments.wire_format,
        message_device="cpu",
    )
    with ours:
        phases.watch(ours)
        for repetition in range(arguments.repetitions + 1):
            if repetition == 1:
                taken.clear()  # the first one of each allocates and connects
            repeat("raw", raw)
            repeat("copy", lambda: other.copy_(flat))
            move(model, rank)
            settle()
            phases.seconds.clear()
            repeat("ours", inner.step)
            seconds = phases.seconds
            seconds["send"] += seconds.pop("perform") - seconds["outer"]
            for phase, value in seconds.items():
                taken.setdefault(phase, []).append(value)
            flat.fill_(1.0)
    out.put((rank, taken))
    barrier.wait()
    manager.shutdown()


def measure_stock(
    arguments: argparse.Namespace, rank: int, address: str, barrier: Any, out: Any
) -> None:
    """The same for torchft's own, with the raw allreduce beside it again."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.groups))
    manager = make_manager(
        replica_id=rank, lighthouse_addr=address, min_replica_size=arguments.groups, timeout=120.0
    )
    model = build_model(arguments.params, arguments.tensors, arguments.device, arguments.dtype)
    flat = torch.ones(arguments.params)
    inner = Still(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    taken: dict[str, list[float]] = {"raw": [], "torchft": []}
    from torchft.local_sgd import DiLoCo as StockDiLoCo

    with StockDiLoCo(manager, [model], inner, outer, sync_every=1):
        for repetition in range(arguments.repetitions + 1):
            if repetition == 1:
                taken = {name: [] for name in taken}
            move(model, rank)
            settle()
            barrier.wait()
            began = time.perf_counter()
            inner.step()
            settle()
            taken["torchft"].append(time.perf_counter() - began)
            barrier.wait()
            began = time.perf_counter()
            manager._pg.allreduce([flat], ReduceOp.SUM).wait()
            taken["raw"].append(time.perf_counter() - began)
            flat.fill_(1.0)
    out.put((rank, taken))
    barrier.wait()
    manager.shutdown()


def settle() -> None:
    """Let the device finish."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@torch.no_grad()
def move(model: nn.Module, rank: int) -> None:
    """What inner training would have done: local parameters that differ from the global ones."""
    for parameter in model.parameters():
        parameter.mul_(1.0 - 0.001 * (rank + 1))


def run(target: Callable[..., None], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Every repetition's slowest process, by name."""
    lighthouse = start_lighthouse(min_replicas=arguments.groups)
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(arguments.groups), context.Queue()
    processes = [
        context.Process(target=target, args=(arguments, rank, lighthouse.address(), barrier, out))
        for rank in range(arguments.groups)
    ]
    for process in processes:
        process.start()
    found = [out.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    lighthouse.shutdown()
    names = found[0][1]
    return {
        name: [max(t) for t in zip(*(taken[name] for _, taken in found), strict=True)]
        for name in names
    }


def ratios(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median, least and most of each ratio, over the repetitions of one run."""
    ours, stock = run(measure, arguments), run(measure_stock, arguments)
    floor = [raw + PASSES / 2 * copy for raw, copy in zip(ours["raw"], ours["copy"], strict=True)]
    against: dict[str, tuple[list[float], list[float]]] = {
        "ours / floor": (ours["ours"], floor),
        "ours / raw": (ours["ours"], ours["raw"]),
        "send / raw": (ours["send"], ours["raw"]),
        "form / raw": (ours["form"], ours["raw"]),
        "outer / raw": (ours["outer"], ours["raw"]),
        "floor / raw": (floor, ours["raw"]),
        "torchft / raw": (stock["torchft"], stock["raw"]),
    }
    table = {
        name: spread([a / b for a, b in zip(*pair, strict=True)]) for name, pair in against.items()
    }
    faster = table["torchft / raw"]["median"] / table["ours / raw"]["median"]
    table["torchft / ours"] = dict.fromkeys(("median", "min", "max"), faster)
    table["raw, ms"] = spread([1000 * s for s in ours["raw"]])
    return table


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="25 million parameters, 5 repetitions")
    parser.add_argument("--json", type=Path, help="write the ratios there")
    parser.add_argument("--params", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--tensors", type=int, default=147)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--wire-format", choices=WIRE_FORMATS, default=WIRE_FORMATS[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--bucket-cap-mb", type=float, default=32.0)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    found = ratios(arguments)
    title = (
        f"{arguments.groups} groups, {arguments.params:,} parameters in {arguments.tensors} "
        f"tensors, {arguments.wire_format}, {arguments.device}"
    )
    table = Table("what", "median", "min", "max", title=title)
    for name, value in found.items():
        table.add_row(name, *(f"{value[key]:.3g}" for key in ("median", "min", "max")))
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"ratios": found, "arguments": vars(arguments)}, default=str)
        )


if __name__ == "__main__":
    main()
