"""How far the planner is from the rounds over slow links that were measured."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from composer_replication.plan import PlannedRun

ROUNDS = Path(__file__).parent.parent / "benchmarks" / "measured" / "bandwidth.json"
HEADERS = 0.956
"""The part of a link's rate that is not headers of TCP, IP and Ethernet."""

LINKS = {"10Gbit": (1e10, 0.0), "1Gbit": (1e9, 0.0), "100Mbit": (1e8, 0.0)}
LINKS["100Mbit+50ms"] = 1e8, 0.1


def measured_rounds(host_s_per_param: float) -> Iterator[tuple[str, float]]:
    """Yield the method of each measured round, and the plan's seconds over the measured ones."""
    found = json.loads(ROUNDS.read_text())
    arguments = found["arguments"]
    for row in found["rows"]:
        if row["link"] not in LINKS or row["method"] == "none":
            continue
        rate, round_trip_s = LINKS[row["link"]]
        steps, is_streaming = arguments["sync_every"], row["method"] == "streaming"
        run = PlannedRun(
            params=arguments["params"],
            link_bits_per_s=HEADERS * rate,
            step_s=row["round_s"] * row["compute_fraction"] / steps,
            groups=arguments["groups"],
            round_trip_s=round_trip_s,
            host_s_per_param=host_s_per_param,
            sync_every=steps,
            num_fragments=arguments["num_fragments"] if is_streaming else 1,
            fragment_sync_delay=arguments["fragment_sync_delay"] if is_streaming else 0,
            wire_format=row["wire_format"],
        )
        planned_s = steps * run.ddp_step_s if row["method"] == "DDP" else run.round_s
        yield row["method"], planned_s / row["round_s"]


def plan_errors(host_s_per_param: float, *methods: str) -> tuple[float, float]:
    """Median and largest relative error in percent of the rounds of these methods, or of all."""
    found = measured_rounds(host_s_per_param)
    errors = [100 * abs(ratio - 1) for method, ratio in found if method in methods or not methods]
    return statistics.median(errors), max(errors)
