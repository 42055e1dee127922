"""What it takes to begin: imports, and joining a run that is under way.

    python benchmarks/startup.py [--quick] [--json OUT] [--params 100e6]
    python benchmarks/startup.py --link 1Gbit --round-s 20

* import: ``composer_replication.callback.callback`` beside ``composer`` alone, in fresh
  interpreters, taking turns.
* join: a replica group joins another one that is in training, beside sending as many bytes as it
  takes over (global parameters and momentum) through gloo. It counts from the start of its manager
  until it may train: first it fetches the state, then it asks for a quorum, which forms at the
  other's next sync. ``--round-s`` is the time from one to the next; 0: it syncs without pause.

The two groups are on loopback, or with ``--link`` in network namespaces with a link between them,
which needs what ``slow_links/bandwidth.py`` does.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from groups import run_groups
from results import command_line, count, report
from rich.progress import track
from slow_links.links import Link, LinkError, Network
from still import Still, build_model

from composer_replication import DiLoCo
from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import start_lighthouse

TENSORS = 147


def import_seconds(module: str) -> float:
    """Of a fresh interpreter that imports one module."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, capture_output=True)
    return time.perf_counter() - began


def measure_imports(turns: int) -> list[float]:
    """The callback's over Composer's, of each turn but the first, which reads the disk."""
    ratios = []
    for _ in track(range(turns + 1), "imports"):
        alone = import_seconds("composer")
        ratios.append(import_seconds("composer_replication.callback.callback") / alone)
    return ratios[1:]


def enter_namespace(name: str) -> None:
    """Have this process's connections from now on in a network namespace."""
    with Path("/run/netns", name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            code = ctypes.get_errno()
            raise OSError(code, f"setns({name}): {os.strerror(code)}")


class Joins:
    """The first group trains until told to end; the second one joins it again and again."""

    def __init__(self, arguments: argparse.Namespace, rank: int, barrier: Any) -> None:
        self._arguments = arguments
        self._barrier = barrier
        self._lighthouse_addr = f"http://{arguments.hosts[0]}:{arguments.port + 1}"
        self._hostname = arguments.hosts[rank]
        self._store = torch.distributed.TCPStore(
            arguments.hosts[0], arguments.port, is_master=rank == 0
        )
        torch.distributed.init_process_group("gloo", store=self._store, rank=rank, world_size=2)

    def send(self, rank: int) -> list[float]:
        """Seconds of sending the state's size, each turn, after one that connects."""
        flat, taken = torch.ones(2 * self._arguments.params), []
        for _ in range(self._arguments.turns + 1):
            self._barrier.wait()
            began = time.perf_counter()
            if rank == 0:
                torch.distributed.send(flat, 1)
            else:
                torch.distributed.recv(flat, 0)
            taken.append(time.perf_counter() - began)
        torch.distributed.destroy_process_group()  # else a group's ranks would be these two
        return taken[1:]

    def _manager(self, replica_id: str) -> Any:
        return make_manager(
            replica_id=replica_id,
            lighthouse_addr=self._lighthouse_addr,
            min_replica_size=1,
            hostname=self._hostname,
            token="local",
        )

    def train(self, model: Any) -> None:
        """Sync until the other one has done with joining."""
        bind = self._lighthouse_addr.removeprefix("http://")
        lighthouse, inner = start_lighthouse(bind=bind, min_replicas=1), Still(model.parameters())
        manager = self._manager("trainer")
        with DiLoCo(manager, model, inner, sync_every=1, schedule=[]):
            inner.step()
            self._barrier.wait()
            while not self._store.check(["end"]):
                time.sleep(self._arguments.round_s)
                inner.step()
        manager.shutdown()
        lighthouse.shutdown()

    def join(self, model: Any) -> dict[str, list[float]]:
        """Seconds before the quorum and from there on, each turn."""
        inner = Still(model.parameters())
        taken: dict[str, list[float]] = {"before": [], "from": []}
        self._barrier.wait()
        for turn in range(self._arguments.turns):
            began = time.perf_counter()
            manager = self._manager(f"joiner-{turn}")
            taken["before"].append(time.perf_counter() - began)
            began = time.perf_counter()
            diloco = DiLoCo(manager, model, inner, sync_every=1, schedule=[])
            with diloco:
                taken["from"].append(time.perf_counter() - began)
                assert diloco.has_joined_others, "it has begun a run of its own"
                inner.step()
            manager.shutdown()
        self._store.set("end", "now")
        return taken


def measure_joins(
    arguments: argparse.Namespace, rank: int, addresses: Sequence[str], barrier: Any, out: Any
) -> None:
    """One of the two groups."""
    del addresses
    if arguments.namespaces:
        enter_namespace(arguments.namespaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = arguments.devices[rank]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    joins = Joins(arguments, rank, barrier)
    taken = {"send": joins.send(rank)}
    model = build_model(arguments.params, TENSORS)
    if rank == 0:
        joins.train(model)
        taken |= dict.fromkeys(("before", "from"), [0.0] * arguments.turns)
    else:
        taken |= joins.join(model)
    out.put(taken)
    barrier.wait()


def run_over(link: Link | None, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """The two groups over a link, or on loopback."""
    arguments.hosts, arguments.namespaces, arguments.devices = ["127.0.0.1"] * 2, [], []
    with nullcontext() if link is None else Network() as network:
        if network is not None and link is not None:
            network.shape(link)
            ends = [network.endpoint(link, side) for side in range(2)]
            arguments.hosts = [end.address for end in ends]
            arguments.devices = [end.device for end in ends]
            arguments.namespaces = network.namespaces
        return run_groups(measure_joins, arguments, lighthouses=0)


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="10 million parameters, one turn of each")
    parser.add_argument("--params", type=count, default=100_000_000)
    parser.add_argument("--turns", type=int, default=5, help="joins")
    parser.add_argument("--imports", type=int, default=5, help="0: only the joins")
    parser.add_argument("--port", type=int, default=29471, help="and the next, for the two groups")
    parser.add_argument("--link", type=Link.parse, help="e.g. 1Gbit; loopback if not given")
    parser.add_argument("--round-s", type=float, default=0.0, help="from sync to sync, seconds")
    arguments = parser.parse_args()
    arguments.groups = 2
    if arguments.quick:
        arguments.params, arguments.turns, arguments.imports = 10_000_000, 1, 1
    imports = measure_imports(arguments.imports) if arguments.imports else []
    try:
        taken = run_over(arguments.link, arguments)
    except LinkError as error:
        sys.exit(f"no shaped links here: {error}")
    before, send = taken["before"], taken["send"]
    join = [a + b for a, b in zip(before, taken["from"], strict=True)]
    rows = {"import of the callback / of composer": imports} if imports else {}
    rows |= {
        "join / send": [a / b for a, b in zip(join, send, strict=True)],
        "join / send, before it asks for a quorum": [
            a / b for a, b in zip(before, send, strict=True)
        ],
        "join, s": join,
        "before it asks for a quorum, s": before,
        "from then on, s": taken["from"],
        "send, s": send,
    }
    report(f"{arguments.params:,} parameters", rows, arguments)


if __name__ == "__main__":
    main()
