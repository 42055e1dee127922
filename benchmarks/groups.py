"""Replica groups of one process each, on this machine, for the benchmarks."""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from composer_replication.replica.lighthouse import start_lighthouse

context = multiprocessing.get_context("forkserver")
"""Fresh processes that share the imports of a benchmark, and nothing of what it has computed."""

Times = dict[str, list[float]]
"""Seconds of each repetition, by what was measured."""

Group = Callable[[argparse.Namespace, int, Sequence[str], Any, Any], None]
"""Takes the arguments, its rank, the addresses of lighthouses, a barrier, a queue for its times."""


def settle() -> None:
    """Let the device finish."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def run_groups(target: Group, arguments: argparse.Namespace, lighthouses: int) -> Times:
    """The slowest group's seconds of every repetition, of ``arguments.groups`` groups.

    Args:
        target: What each of them does.
        arguments: Passed on.
        lighthouses: How many there are: a process that is in several runs needs one for each.
    """
    servers = [start_lighthouse(min_replicas=arguments.groups) for _ in range(lighthouses)]
    addresses = [server.address() for server in servers]
    barrier, out = context.Barrier(arguments.groups), context.Queue()
    processes = [
        context.Process(target=target, args=(arguments, rank, addresses, barrier, out), daemon=True)
        for rank in range(arguments.groups)
    ]
    for process in processes:
        process.start()
    found: list[Times] = []
    while len(found) < len(processes):
        with suppress(queue.Empty):
            found.append(out.get(timeout=1))
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            sys.exit("a replica group has failed: what it said is above")
    for process in processes:
        process.join()
    for server in servers:
        server.shutdown()
    return {
        name: [max(each) for each in zip(*(taken[name] for taken in found), strict=True)]
        for name in found[0]
    }
