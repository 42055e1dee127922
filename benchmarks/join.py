"""What a join costs the groups in training: time of their syncs, and memory of the donor.

    python benchmarks/join.py [--quick] [--json OUT] [--params 100e6] [--turns 5] [--round-s 2]
                              [--link 1Gbit]

Two replica groups of one process each train on loopback, a sync every ``--round-s`` seconds, and a
third one joins, syncs with them and leaves, again and again. An inner step does nothing. With
``--link`` each group has a network card of that rate; this needs root (``slow_links/links.py``).

* longest / median: the longest sync of a group in training that was under way while the third one
  joined, over the median of its syncs with two groups. The sync of the join itself is one of them:
  its quorum connects all groups anew, and it is a sync of three groups.
* longest / median of three: the same over the median of the syncs with three groups, which send
  4/3 as much as two, and share the processors. It is 1 if a join costs the others nothing.
* median of three, s: that median.
* join, s: from the start of the joiner's manager until it may train, the wait for a sync included.
* donor: the peak of a training group's memory while the third one joins, above its own peak without
  joins, in bytes a parameter. A copy of the state takes 8. Linux alone tells it (/proc).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from groups import run_groups
from results import command_line, count, report
from slow_links.links import Link, LinkError
from slow_links.star import Star, enter
from still import Still, build_model
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from composer_replication import DiLoCo
from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import start_lighthouse

TENSORS = 147
GROUPS = 3
JOINER = 2
BEFORE = 5
"""Syncs without a join, before the first one."""

STAYS = 4
"""Syncs of the third group after a join."""

GONE_S = 3.0
"""After so long the lighthouse has forgotten a group that has left."""

QUICK = {"params": 10_000_000, "turns": 3, "round_s": 1.0}

Window = tuple[float, float]
"""When something began and ended, by ``time.monotonic``, which all processes share."""


def measure(
    arguments: argparse.Namespace, rank: int, addresses: Sequence[str], barrier: Any, out: Any
) -> None:
    """One replica group: two that train, and one that joins them."""
    del addresses  # those lighthouses would wait for all three
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", arguments.port, is_master=rank == 0)
    if arguments.link is not None:
        enter(arguments.ends[rank][0])  # the store keeps the connections that it has
    model = build_model(arguments.params, TENSORS)
    run = join_again_and_again if rank == JOINER else train
    out.put(run(arguments, rank, model, barrier, store))
    barrier.wait()


def _manager(arguments: argparse.Namespace, rank: int, replica_id: str) -> Any:
    return make_manager(
        replica_id=replica_id,
        lighthouse_addr=arguments.lighthouse,
        hostname=arguments.ends[rank][1],
        min_replica_size=2,
        timeout=120.0,
        token="local",
    )


def train(
    arguments: argparse.Namespace, rank: int, model: Any, barrier: Any, store: Any
) -> dict[str, list[float]]:
    """Sync until the third group has done with joining."""
    manager, inner = _manager(arguments, rank, f"trainer-{rank}"), Still(model.parameters())
    syncs: list[Window] = []

    def sync() -> None:
        time.sleep(arguments.round_s)
        began = time.monotonic()
        inner.step()
        syncs.append((began, time.monotonic()))

    with DiLoCo(manager, model, inner, sync_every=1, schedule=[], num_replicas=2):
        sync()
        sync()  # the first ones allocate and connect
        syncs.clear()
        _reset_peak()
        for _ in range(BEFORE):
            sync()
        own_peak = _peak()
        _reset_peak()
        barrier.wait()
        while not store.check(["last"]) or len(syncs) < int(store.get("last")):
            sync()
            if rank == 0 and store.check(["joins"]) and not store.check(["last"]):
                store.set("last", str(len(syncs) + 2))  # both end with the same sync
        peak = _peak()
    manager.shutdown()
    joins: list[Window] = json.loads(store.get("joins"))
    stays: list[Window] = json.loads(store.get("stays"))
    usual = statistics.median(_seconds_outside(syncs, [*joins, *stays]))
    of_three = statistics.median(e - b for b, e in syncs if any(s < b < t for s, t in stays))
    longest = [max(e - b for b, e in syncs if _overlap((b, e), join)) for join in joins]
    return {
        "longest / median": [seconds / usual for seconds in longest],
        "longest / median of three": [seconds / of_three for seconds in longest],
        "median sync, s": [usual],
        "median of three, s": [of_three],
        "join, s": [end - began for began, end in joins],
        "donor, bytes a parameter": [(peak - own_peak) / arguments.params],
    }


def join_again_and_again(
    arguments: argparse.Namespace, rank: int, model: Any, barrier: Any, store: Any
) -> dict[str, list[float]]:
    """Join, sync some times and leave; tell the others when it was."""
    joins: list[Window] = []
    stays: list[Window] = []
    inner = Still(model.parameters())
    barrier.wait()
    for turn in range(arguments.turns):
        began = time.monotonic()
        manager = _manager(arguments, rank, f"zz-joiner-{turn}")
        diloco = DiLoCo(manager, model, inner, sync_every=1, schedule=[])
        with diloco:
            joins.append((began, time.monotonic()))
            if not diloco.has_joined_others:
                raise RuntimeError(f"group {rank} has begun a run of its own")
            for _ in range(STAYS):
                time.sleep(arguments.round_s)
                inner.step()
            stays.append((joins[-1][1], time.monotonic()))
        manager.shutdown()
        time.sleep(GONE_S + 2 * arguments.round_s)  # the others have synced without it
    store.set("stays", json.dumps(stays))
    store.set("joins", json.dumps(joins))
    nothing = [0.0] * len(joins)
    return {
        "longest / median": nothing,
        "longest / median of three": nothing,
        "median sync, s": [0.0],
        "median of three, s": [0.0],
        "join, s": nothing,
        "donor, bytes a parameter": [0.0],
    }


def _seconds_outside(syncs: list[Window], windows: list[Window]) -> list[float]:
    return [e - b for b, e in syncs if not any(_overlap((b, e), window) for window in windows)]


def _overlap(one: Window, other: Window) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, "Linux tells it"
    return 1024 * int(found[1])


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="10 million parameters, 3 joins, a sync every second")
    parser.add_argument("--params", type=count, default=100_000_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--round-s", type=float, default=2.0)
    parser.add_argument("--link", type=Link.parse, help="such as 1Gbit; needs root")
    parser.add_argument("--port", type=int, default=29_541, help="of a store of the benchmark's")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    lighthouse = start_lighthouse(min_replicas=2, heartbeat_timeout_ms=1_000)
    arguments.groups, arguments.lighthouse = GROUPS, lighthouse.address()
    arguments.ends = [(None, None)] * GROUPS
    with ExitStack() as stack:
        stack.callback(lighthouse.shutdown)
        if arguments.link is not None:
            try:
                star = stack.enter_context(Star(arguments.link, GROUPS))
            except LinkError as error:
                sys.exit(f"no shaped links here: {error}")
            arguments.ends = [(star.namespace(end), star.address(end)) for end in range(GROUPS)]
            port = arguments.lighthouse.rpartition(":")[2]
            arguments.lighthouse = f"http://{star.ADDRESS}:{port}"
        rows = run_groups(measure, arguments, lighthouses=0)
    vars(arguments).update(link=arguments.link and arguments.link.name, lighthouse=None, ends=None)
    report(f"a third group joins two, {arguments.params:,} parameters", rows, arguments)


if __name__ == "__main__":
    main()
