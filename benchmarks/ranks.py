"""One replica group of several DDP ranks: each its share of the global parameters, or all of them.

    python benchmarks/ranks.py [--quick] [--json OUT] [--params 50e6] [--tensors 147] [--ranks 4]

Of one group alone, over a simulated network: what is measured is what ranks do between themselves.
In one run, taking turns, the slowest rank of each repetition counting: seconds of a sync in which
each rank holds and moves its share and the ranks gather global parameters (shared), and of one in
which they gather the mean and each moves all (whole).
And bytes a parameter that a rank holds in global parameters and momentum.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import run_groups
from results import command_line, count, report
from still import Still, build_model
from torch import Tensor

from composer_replication import DiLoCo
from composer_replication.simulation.manager import SimulatedManager
from composer_replication.simulation.shared_buffer import SharedBuffer

QUICK = {"params": 8_000_000, "repetitions": 3}


class OnWholeTensors(torch.optim.SGD):
    """The same outer step, of a class that may read whole tensors for all that DiLoCo knows."""


def bytes_held(diloco: DiLoCo) -> int:
    """Memory of global parameters and outer momentum, each storage counted once."""
    tensors: list[Tensor] = []
    for fragment in diloco._outer.fragments:
        tensors += fragment.globals.theta.values()
        tensors += [s["momentum_buffer"] for s in fragment.globals.optimizer.state.values()]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def measure(
    arguments: argparse.Namespace, rank: int, addresses: Sequence[str], barrier: Any, out: Any
) -> None:
    """One rank: each kind in turn, the seconds of each repetition."""
    del addresses
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // arguments.groups))
    store = f"file://{arguments.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.groups)
    taken: dict[str, list[float]] = {}
    kinds: dict[str, tuple[DiLoCo, Still]] = {}
    for kind, outer in (("shared", torch.optim.SGD), ("whole", OnWholeTensors)):
        model = build_model(arguments.params, arguments.tensors)
        inner = Still(model.parameters())
        manager = SimulatedManager(SharedBuffer(1, (), None), 0)
        loop = DiLoCo(
            manager,
            model,
            inner,
            outer_optimizer=functools.partial(outer, lr=0.7, momentum=0.9, nesterov=True),
            sync_every=1,
            ranks=dist.group.WORLD,
        )
        kinds[kind] = loop, inner
    with kinds["shared"][0], kinds["whole"][0]:
        for repetition in range(arguments.repetitions + 1):
            if repetition == 1:
                taken.clear()  # the first one of each allocates
            for kind, (_, inner) in kinds.items():
                barrier.wait()
                began = time.perf_counter()
                inner.step()
                taken.setdefault(kind, []).append(time.perf_counter() - began)
    digests = {diloco.global_digest() for diloco, _ in kinds.values()}
    if len(digests) > 1:
        raise RuntimeError("shared and whole differ")
    held = {kind: bytes_held(diloco) / arguments.params for kind, (diloco, _) in kinds.items()}
    if arguments.groups > 1 and not held["whole"] > held["shared"]:
        raise RuntimeError(f"whole is not compared with: bytes a parameter are {held}")
    for kind, each in held.items():
        taken[f"{kind}, bytes a parameter"] = [each] * arguments.repetitions
    barrier.wait()
    out.put(taken)


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="8 million parameters, 3 repetitions")
    parser.add_argument("--params", type=count, default=50_000_000)
    parser.add_argument("--tensors", type=int, default=147)
    parser.add_argument("--ranks", dest="groups", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        found = run_groups(measure, arguments, lighthouses=0)
    pairs = zip(found["shared"], found["whole"], strict=True)
    rows = {"shared / whole": [shared / whole for shared, whole in pairs]}
    title = f"a group of {arguments.groups} ranks, {arguments.params:,} parameters"
    report(title, rows | found, arguments)


if __name__ == "__main__":
    main()
