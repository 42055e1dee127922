"""What groups of unequal speed train together, beside what each of them trains alone.

    python benchmarks/unequal.py [--quick] [--json OUT] [--speeds 1 1.5 3] [--step-s 0.05]

Replica groups of one process each on loopback, with 1 million parameters. An inner step sleeps: in
group i ``--speeds[i]`` times ``--step-s`` seconds. Two schedules: ``round_seconds: auto``, in which
the fastest group takes ``sync_every`` inner steps a round and the others as many as fit in its
time, and ``sync_every`` alone, in which all take as many and wait for the slowest.

* of alone: inner steps a second in the model, over those of the same group without any sync.
* all groups: the same of the sum over groups.
* waits: the part of the time that the group waits for a quorum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from groups import Times, run_groups
from results import command_line, report
from still import Still, build_model

from composer_replication import DiLoCo
from composer_replication.replica.factory import make_manager

SCHEDULES: dict[str, dict[str, Any]] = {
    "auto": {"round_seconds": "auto"},
    "equal steps": {"weight_by": "steps", "schedule": []},
}
WARM_UP = 3
"""Syncs after which all groups have said their pace."""

ALONE_STEPS = 20

QUICK = {"sync_every": 30, "rounds": 3, "step_s": 0.02}


class Sleeping(Still):
    """An inner optimizer that takes its time and does nothing."""

    def __init__(self, parameters: Any, step_s: float) -> None:
        super().__init__(parameters)
        self._step_s = step_s

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sleep for ``step_s`` seconds, in the place of a forward and a backward pass."""
        time.sleep(self._step_s)


def measure(
    arguments: argparse.Namespace, rank: int, addresses: Sequence[str], barrier: Any, out: Any
) -> None:
    """One replica group: alone, then with the others under each schedule."""
    torch.set_num_threads(1)
    step_s = arguments.step_s * arguments.speeds[rank]
    inner = Sleeping(build_model(1_000, 1).parameters(), step_s)
    inner.step()  # torch's first one imports
    began = time.monotonic()
    for _ in range(ALONE_STEPS):
        inner.step()
    alone = ALONE_STEPS / (time.monotonic() - began)
    groups = range(arguments.groups)
    found: Times = {}
    for schedule, address in zip(SCHEDULES, addresses, strict=True):
        barrier.wait()
        rates, waits = train(arguments, schedule, rank, address)
        nothing = [0.0] * arguments.rounds
        for group in groups:
            is_own = group == rank
            of_alone = [rate / alone for rate in rates] if is_own else nothing
            found[f"{schedule}: group {group}, of alone"] = of_alone
            found[f"{schedule}: group {group}, waits"] = waits if is_own else nothing
    for group in groups:
        found[f"alone {group}"] = [alone if group == rank else 0.0]
    out.put(found)


def train(
    arguments: argparse.Namespace, schedule: str, rank: int, address: str
) -> tuple[list[float], list[float]]:
    """Inner steps a second, and the part of the time spent waiting, in each round."""
    manager = make_manager(
        replica_id=f"{rank}",
        lighthouse_addr=address,
        min_replica_size=arguments.groups,
        token="local",
    )
    model = build_model(1_000_000, 8)
    inner = Sleeping(model.parameters(), arguments.step_s * arguments.speeds[rank])
    settings = {"sync_every": arguments.sync_every, **SCHEDULES[schedule]}
    rates, waits = [], []
    with DiLoCo(manager, model, inner, num_replicas=arguments.groups, **settings) as diloco:
        while len(rates) < WARM_UP + arguments.rounds:
            began = time.monotonic()
            reports = []
            while not reports:
                inner.step()
                reports = diloco.pop_finished_syncs()
            seconds = time.monotonic() - began
            rates.append(reports[0].contribution / seconds)  # weighted by steps
            waits.append(reports[0].wait_seconds / seconds)
    manager.shutdown()
    return rates[WARM_UP:], waits[WARM_UP:]


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = command_line(__doc__, quick="30 inner steps of 20 ms a round, 3 rounds")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 1.5, 3.0])
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--sync-every", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    arguments.groups = len(arguments.speeds)
    rows = run_groups(measure, arguments, lighthouses=len(SCHEDULES))
    alone = [rows.pop(f"alone {group}")[0] for group in range(arguments.groups)]
    for schedule in SCHEDULES:
        names = [f"{schedule}: group {group}, of alone" for group in range(arguments.groups)]
        together = zip(*(rows[name] for name in names), strict=True)
        rows[f"{schedule}: all groups, of alone"] = [
            sum(map(float.__mul__, each, alone)) / sum(alone) for each in together
        ]
    report("groups of unequal speed", rows, arguments)


if __name__ == "__main__":
    main()
