"""What one sync takes, beside one raw allreduce of the same bytes, and where the time goes.

    python benchmarks/sync.py [--quick] [--json OUT] [--params 100e6] [--tensors 147] [--groups 2]
                              [--wire-format int8] [--device cuda] [--dtype bfloat16]
                              [--backup-device cpu] [--backend nccl]

Replica groups of one process each on this machine, over gloo and loopback; an inner step does
nothing, so that what is left is the sync. In one run, taking turns, the slowest process of each
repetition counting:

* raw: one gloo allreduce of one flat preallocated fp32 tensor; on a GPU in buckets of 64 MiB, which
  gloo copies through host memory beside each other;
* copy: how fast all processes together copy memory, which says what nine passes over the
  pseudo-gradient take; floor = raw + these; on a GPU they take next to nothing, and floor = raw;
* ours, and the phases of it: pack, send (until the last byte is there), outer (outer step and the
  way back into the model), and the rest (quorum, vote);
* torchft: its own DiLoCo under a manager like ours; on a GPU in buckets of 64 MiB too.

``composer-replication plan`` takes "ours, ns a parameter" as ``--host-s-per-param``, in seconds.

On ``--device cuda`` the groups share a GPU, over NCCL too. ``--backup-device cpu``: global
parameters and momentum rest in host memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from groups import run_groups, settle
from results import command_line, count, report
from still import Still, build_model
from torch import nn
from torch.distributed import ReduceOp

from composer_replication import DiLoCo
from composer_replication.diloco.division import BUCKET
from composer_replication.settings import WIRE_FORMATS

from composer_replication.replica.factory import make_manager  # isort: skip
from torchft.local_sgd import DiLoCo as StockDiLoCo  # isort: skip


PASSES = 9
"""Over the bytes of the pseudo-gradient: pack it (3), outer step (5), way back (1)."""

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
        for fragment in diloco._outer.fragments:
            for phase, name, thing in (
                ("pack", "pack", fragment),
                ("send", "send", fragment),
                ("outer", "_step", fragment),
            ):
                setattr(thing, name, self._timed(phase, getattr(thing, name)))
            fragment.perform_sync = self._timed("perform", fragment.perform_sync)

    def _timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.of(phase):
                return call(*arguments, **named)

        return timed


def measure(
    arguments: argparse.Namespace, rank: int, addresses: Sequence[str], barrier: Any, out: Any
) -> None:
    """One replica group: every method in turn, the seconds of each repetition."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.groups))
    if arguments.backend == "nccl":  # it refuses two groups on one GPU of one host
        os.environ |= {"NCCL_HOSTID": f"group-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    manager, *stock_managers = (
        make_manager(
            replica_id=rank,
            lighthouse_addr=address,
            min_replica_size=arguments.groups,
            timeout=120.0,
            token="local",
            backend=arguments.backend,
        )
        for address in addresses
    )
    device, stocks = arguments.device, stocks_of(arguments)
    model, *stock_models = (
        build_model(arguments.params, arguments.tensors, device, arguments.dtype)
        for _ in range(1 + len(stocks))
    )
    flat = torch.ones(arguments.params, device=device)
    other = torch.empty_like(flat)
    taken: dict[str, list[float]] = {}

    def repeat(name: str, call: Callable[[], Any]) -> None:
        settle()
        barrier.wait()
        began = time.perf_counter()
        call()
        settle()
        taken.setdefault(name, []).append(time.perf_counter() - began)

    def raw() -> None:
        parts = [flat] if device == "cpu" else flat.split(BUCKET)
        for work in [manager._pg.allreduce([part], ReduceOp.SUM) for part in parts]:
            work.wait()

    inner, phases = Still(model.parameters()), Phases()
    ours = DiLoCo(
        manager,
        model,
        inner,
        sync_every=1,
        schedule=[],
        num_replicas=arguments.groups,
        wire_format=arguments.wire_format,
        backup_device=arguments.backup_device,
    )
    with ExitStack() as opened:
        opened.enter_context(ours)
        stock_inners = []
        for stock_manager, stock_model, own in zip(
            stock_managers, stock_models, stocks.values(), strict=True
        ):
            stock_inner = Still(stock_model.parameters())
            outer = torch.optim.SGD(stock_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            stock = StockDiLoCo(
                stock_manager, [stock_model], stock_inner, outer, sync_every=1, **own
            )
            opened.enter_context(stock)
            stock_inners.append(stock_inner)
        phases.watch(ours)
        for repetition in range(arguments.repetitions + 1):
            if repetition == 1:
                taken.clear()  # the first one of each allocates and connects
            repeat("raw", raw)
            repeat("copy", lambda: other.copy_(flat))
            move(model, rank)
            phases.seconds.clear()
            repeat("ours", inner.step)
            seconds = phases.seconds
            seconds["send"] += seconds.pop("perform") - seconds["outer"]
            for phase, value in seconds.items():
                taken.setdefault(phase, []).append(value)
            for name, stock_manager, stock_model, stock_inner in zip(
                stocks, stock_managers, stock_models, stock_inners, strict=True
            ):
                move(stock_model, rank)
                repeat(name, stock_inner.step)
                if stock_manager.current_step() != repetition + 1:  # it would only have warned
                    raise RuntimeError(f"torchft's sync did not commit: {stock_manager.errored()}")
            flat.fill_(1.0)
    out.put(taken)
    barrier.wait()
    for each in (manager, *stock_managers):
        each.shutdown()


def stocks_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """torchft's DiLoCo, in the ways in which it is measured, with their arguments."""
    buckets = {"use_bucketization": True, "bucket_cap_mb": 64}
    return {"torchft": {}} | ({} if arguments.device == "cpu" else {"torchft, buckets": buckets})


@torch.no_grad()
def move(model: nn.Module, rank: int) -> None:
    """What inner training would have done: local parameters that differ from the global ones."""
    for parameter in model.parameters():
        parameter.mul_(1.0 - 0.02 * (rank + 1))  # bfloat16 would round 0.999 back


def ratios(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Each ratio in the repetitions of one run."""
    stocks = stocks_of(arguments)
    taken = run_groups(measure, arguments, lighthouses=1 + len(stocks))
    raw, ours = taken["raw"], taken["ours"]
    passes = PASSES / 2 if arguments.device == "cpu" else 0.0
    floor = [each + passes * copy for each, copy in zip(raw, taken["copy"], strict=True)]
    against: dict[str, tuple[list[float], list[float]]] = {
        "ours / floor": (ours, floor),
        "ours / raw": (ours, raw),
        "send / raw": (taken["send"], raw),
        "pack / raw": (taken["pack"], raw),
        "outer / raw": (taken["outer"], raw),
        "floor / raw": (floor, raw),
    }
    against |= {f"{name} / raw": (taken[name], raw) for name in stocks}
    against |= {f"{name} / ours": (taken[name], ours) for name in stocks}
    rows = {name: [a / b for a, b in zip(*pair, strict=True)] for name, pair in against.items()}
    return rows | {
        "raw, ms": [1000 * seconds for seconds in raw],
        "ours, ns a parameter": [1e9 * seconds / arguments.params for seconds in ours],
    }


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="25 million parameters, 5 repetitions")
    parser.add_argument("--params", type=count, default=100_000_000)
    parser.add_argument("--tensors", type=int, default=147)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--wire-format", choices=WIRE_FORMATS, default=WIRE_FORMATS[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--backup-device", help="of the global parameters; default: the model's")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    title = (
        f"{arguments.groups} groups, {arguments.params:,} parameters in {arguments.tensors} "
        f"tensors, {arguments.wire_format}, {arguments.device}, "
        f"{arguments.backend}"
    )
    report(title, ratios(arguments), arguments)


if __name__ == "__main__":
    main()
