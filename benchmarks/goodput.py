"""Goodput under the failure rates of published studies, simulated with measured costs.

    python benchmarks/goodput.py [RUN] [--groups 2 8 16] [--chips 1.2e6] [--json OUT]

With the folder of a run it says first what the run's goodput was and where the time of its groups
went. The costs are then those of the run, and it is replayed: the kills of `make chaos`, at the
times at which it had them. The table has the error of the simulation. Without a run the costs are
those of the run of 8 groups under kills alone, in docs/faults.md.

The failure rate is that of Decoupled DiLoCo's study as articles about it give it: 1.2 million
chips, each of which fails once a year. A failure ends its whole group here. In the study a learner
goes on with fewer chips, so theirs is the easier case.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from account import CHAOS, describe_goodput, measure_goodput
from results import command_line, write
from rich.console import Console
from rich.table import Table

from composer_replication.config_file import ConfigError, diloco_section, read_unresolved
from composer_replication.group.run_folder import CONFIG
from composer_replication.launch.run_record import Run, open_run
from composer_replication.util.json_files import read_json

YEAR_S = 365.25 * 86_400
MODELLED = ("kill", "first_round", "end")
"""Faults of `make chaos` that the replay knows: the group ends at once, and is started again."""

PUBLISHED = (
    ("Decoupled DiLoCo, 16 learners", 0.93, "arXiv 2604.21428, simulated"),
    ("Decoupled DiLoCo, 8 learners", 0.88, "arXiv 2604.21428, simulated"),
    ("Decoupled DiLoCo, 2 learners", 0.70, "arXiv 2604.21428, simulated"),
    ("elastic data parallel", 0.58, "arXiv 2604.21428, simulated"),
    ("torchft, 300 L40S, a failure a minute", 0.823, "PyTorch blog on fault-tolerant Llama"),
)

Strike = tuple[float, int]
"""When a group fails, in seconds since the begin, and which."""


@dataclass(frozen=True)
class Costs:
    """What training and failures cost.

    Args:
        inner_step_s: Seconds of an inner step.
        sync_every: Inner steps in a round.
        sync_s: Seconds that a sync blocks training while nobody fails, its usual wait included.
        detection_s: Seconds after a failure until the others form a quorum without the group.
        restart_s: Seconds after a failure until the group is ready to join at the next sync.
        checkpoint_rounds: Rounds between two checkpoints, which count if all groups fail.
    """

    inner_step_s: float
    sync_every: int
    sync_s: float
    detection_s: float
    restart_s: float
    checkpoint_rounds: int = 1


def simulate(costs: Costs, groups: int, strikes: Iterable[Strike], duration_s: float) -> float:
    """Simulate a run, and return its goodput at the first commit after ``duration_s``.

    All groups train a round at equal speed, and sync. A group that fails loses its inner steps of
    the round. The others keep theirs, and sync as soon as they have noticed. It joins with their
    next sync after its restart. If all have failed, all wait for each other and go on from the last
    checkpoint. A group that is not training cannot fail.

    Args:
        costs: What everything takes.
        groups: Number of replica groups.
        strikes: The failures, in the order of their times.
        duration_s: Seconds to simulate.
    """
    kept, seconds = train(costs, groups, strikes, duration_s)
    return kept * costs.inner_step_s / (groups * seconds)


def train(
    costs: Costs, groups: int, strikes: Iterable[Strike], duration_s: float
) -> tuple[int, float]:
    """Simulate as ``simulate`` does.

    Returns:
        The inner steps of all groups that are in the model, and the seconds until that commit.
    """
    pending = deque(strikes)
    up, ready_at = set(range(groups)), dict[int, float]()
    now, kept, saved, rounds = 0.0, 0, 0, 0
    while now < duration_s:
        trained = now + costs.sync_every * costs.inner_step_s
        syncs_at = trained
        while up and pending and pending[0][0] < syncs_at + costs.sync_s:
            at, group = pending.popleft()
            if group in up and at >= now:
                up.remove(group)
                ready_at[group] = at + costs.restart_s
                syncs_at = max(trained, at + costs.detection_s)
        if not up:
            now, kept = max(ready_at.values()), saved
            up, ready_at = set(ready_at), {}
            continue
        now, rounds = syncs_at + costs.sync_s, rounds + 1
        kept += costs.sync_every * len(up)
        saved = kept if rounds % costs.checkpoint_rounds == 0 else saved
        joining = {group for group, at in ready_at.items() if at <= syncs_at}
        up |= joining
        ready_at = {group: at for group, at in ready_at.items() if group not in joining}
    return kept, now


def random_strikes(seed: int, groups: int, mean_s: float, duration_s: float) -> list[Strike]:
    """Failures of each group at exponential times.

    Args:
        seed: Seed of the times.
        groups: Number of replica groups.
        mean_s: Mean seconds between two failures of a group.
        duration_s: Seconds to cover.
    """
    draw = random.Random(seed)
    strikes = []
    for group in range(groups):
        at = draw.expovariate(1 / mean_s)
        while at < duration_s:
            strikes.append((at, group))
            at += draw.expovariate(1 / mean_s)
    return sorted(strikes)


def measured_costs(
    run: Run, goodput: Mapping[str, Any], chaos: Mapping[str, Any], defaults: Costs
) -> Costs:
    """The costs of a run.

    Args:
        run: The run.
        goodput: From ``measure_goodput``.
        chaos: Its ``chaos.json``; empty if no faults were injected.
        defaults: The checkpoints, and the costs that the run has not had.

    Raises:
        ValueError: The run has no goodput, or no config that says ``sync_every``.
    """
    sync_every = None
    with contextlib.suppress(ConfigError):
        sync_every = diloco_section(read_unresolved(run.run_dir / CONFIG)).get("sync_every")
    if not goodput or sync_every is None:
        raise ValueError(
            f"{run.run_dir} has no goodput or no sync_every: give the folder of a run of `launch` "
            "or `make chaos` with at least two syncs"
        )
    costs = goodput["costs"]
    found = {**asdict(defaults), "sync_every": sync_every}
    found |= {"inner_step_s": costs["inner_step_s"], "sync_s": costs["sync_s"] + costs["wait_s"]}
    if costs["ends"]:
        # A measured start ends with the others' sync. It comes half a round later in the mean.
        half_s = sync_every * costs["inner_step_s"] / 2
        found["restart_s"] = costs["dead_s"] + max(0.0, costs["starting_s"] - half_s)
    detections = list(detection_times(run, chaos))
    if detections:
        found["detection_s"] = median(detections)
    return Costs(**found)


def detection_times(run: Run, chaos: Mapping[str, Any]) -> Iterator[float]:
    """For each kill and survivor that had to wait for it, the seconds until it had a quorum."""
    for fault in chaos.get("injected", ()):
        at = chaos["began_at"] + fault["at"]
        for replica_id, syncs in run.groups.items():
            if fault["kind"] not in MODELLED or int(replica_id) in fault["victims"]:
                continue
            usual_s = median(line["diloco/wait_seconds"] for line in syncs)
            after = next((line for line in syncs if line["time"] > at), None)
            if after is not None and after["diloco/wait_seconds"] > 2 * usual_s:
                synced_s = after["diloco/sync_seconds"] - after["diloco/wait_seconds"]
                if after["time"] - synced_s > at:
                    yield after["time"] - synced_s - at


def replay(run: Run, goodput: Mapping[str, Any], chaos: Mapping[str, Any], costs: Costs) -> float:
    """The goodput of the simulation under the kills of a run of `make chaos`.

    Each comes as long after a commit as it did there, in the first round after its time: what it
    costs the others depends on that.
    """
    groups, strikes = len(run.groups), []
    commits = sorted(line["time"] for syncs in run.groups.values() for line in syncs)
    for fault in chaos.get("injected", ()):
        if fault["kind"] in MODELLED:
            at = chaos["began_at"] + fault["at"]
            before = [time for time in commits if time <= at]
            since = at - before[-1] if before else fault["at"]
            _, commit = train(costs, groups, sorted(strikes), fault["at"])
            strikes.append((commit + since, fault["victims"][0]))
    return simulate(costs, groups, sorted(strikes), goodput["group_seconds"] / groups)


# Of the run under kills in measured/chaos-8-groups.json, which has fewer digits: ``sync_s`` is its
# sync and its quorum, and ``restart_s`` what is left of the time to recovery before the next sync.
DEFAULTS = Costs(inner_step_s=0.114, sync_every=20, sync_s=0.281, detection_s=2.2, restart_s=11.8)


def parse() -> argparse.Namespace:
    """Read from the command line which groups and failure rates are simulated, with which costs."""
    parser = command_line(__doc__, quick="2 seeds of an hour")
    parser.add_argument("run", nargs="?", type=Path, help="folder of a run: its costs are used")
    parser.add_argument("--groups", nargs="+", type=int, default=[2, 8, 16])
    parser.add_argument("--chips", type=float, default=1.2e6, help="of all groups together")
    parser.add_argument("--chip-years", type=float, default=1.0, help="between failures of a chip")
    parser.add_argument("--sync-every", type=int, help="in place of the run's inner steps")
    parser.add_argument("--inner-step-s", type=float, help="in place of the run's seconds")
    parser.add_argument("--checkpoint-rounds", type=int, default=DEFAULTS.checkpoint_rounds)
    parser.add_argument("--hours", type=float, default=6.0, help="to simulate")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.hours = 2, 1.0
    return arguments


def spread_of(values: list[float]) -> str:
    """The mean of goodputs, and the least and the most, for people."""
    return f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"


def main() -> None:
    """Simulate, print the table, write the JSON."""
    arguments = parse()
    costs = DEFAULTS
    table = Table("run", "a group fails every", "goodput", "source")
    found: dict[str, Any] = {}
    console = Console()
    if arguments.run is not None:
        run = open_run(arguments.run)
        chaos = read_json(run.run_dir / CHAOS)
        account = measure_goodput(run)
        for name, text in describe_goodput(account):
            console.print(f"{name}: {text}")
        costs = measured_costs(run, account, chaos, DEFAULTS)
        measured, replayed = account["goodput"], replay(run, account, chaos, costs)
        error = replayed - measured
        left_out = sorted({fault["kind"] for fault in chaos.get("injected", ())} - {*MODELLED})
        source = (
            f"without {', '.join(left_out)}" if left_out else f"error {100 * error:+.1f} points"
        )
        table.add_row(
            f"{len(run.groups)} groups of the given run", "", f"{measured:.1%}", "measured"
        )
        table.add_row("the same kills", "", f"{replayed:.1%}", f"simulated: {source}")
        found |= {"measured": account, "replayed": replayed, "not_replayed": left_out}
    names = ("sync_every", "inner_step_s", "checkpoint_rounds")
    given = {name: getattr(arguments, name) for name in names}
    costs = replace(costs, **{name: value for name, value in given.items() if value is not None})
    for groups in arguments.groups:
        mean_s = YEAR_S * arguments.chip_years * groups / arguments.chips
        seconds = 3600 * arguments.hours
        values = [
            simulate(costs, groups, random_strikes(seed, groups, mean_s, seconds), seconds)
            for seed in range(arguments.seeds)
        ]
        table.add_row(f"{groups} groups", f"{mean_s:.0f} s", spread_of(values), "simulated")
        found[f"{groups} groups"] = values
    for name, goodput, source in PUBLISHED:
        table.add_row(name, "", f"{goodput:.1%}", source)
    console.print(table)
    console.print(", ".join(f"{name} {value:.3g}" for name, value in asdict(costs).items()))
    write({"costs": asdict(costs), **found}, arguments)


if __name__ == "__main__":
    main()
