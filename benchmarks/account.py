"""Goodput: how much of the training that a run's groups could have done is in the final model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from statistics import median
from typing import Any

from group_time import PARTS, GroupTime, Window, account

from composer_replication.group.run_folder import STATUS, log_path
from composer_replication.launch.run_record import Run
from composer_replication.util.json_files import read_json

CHAOS = "chaos.json"
"""What `make chaos` writes into a run's folder."""

HOLDING_UP = ("stop", "slow", "unreachable", "one_way")
"""Faults that hold a group up and do not end it."""


def measure_goodput(run: Run) -> dict[str, Any]:
    """Measure a run's goodput, and where the time of its groups went.

    Goodput is the inner steps that are in the final model, divided by those that the same groups
    would have trained in the same time without faults, syncs and waits. How fast a group would have
    trained is its own median over the times between two syncs.

    Returns:
        The object; empty if no group has made inner steps between two syncs. ``seconds`` says where
        the time of all groups went and adds up to ``group_seconds``, ``costs`` what a sync, a wait,
        a death and a start cost, and ``goodput_outside_faults`` leaves out the time ``dead``.
    """
    chaos = read_json(run.run_dir / CHAOS)
    end = max(syncs.newest.get("time", 0.0) for syncs in run.groups.values())
    times = {}
    for id, syncs in run.groups.items():
        status = read_json(log_path(run.run_dir, id).with_name(STATUS))
        times[id] = account(
            syncs.starts,
            syncs,
            faults=fault_windows(chaos, id),
            end=None if id in run.results else end,
            trained_at=status.get("trained_at"),
        )
    return summarize({id: time for id, time in times.items() if time is not None})


def fault_windows(chaos: Mapping[str, Any], replica_id: str) -> list[Window]:
    """When faults held a group up, by ``chaos.json``. A fault that ended it is no such fault.

    Args:
        chaos: The file's contents; empty if no faults were injected.
        replica_id: The group.
    """
    began = chaos.get("began_at") or 0.0
    return [
        (began + fault["at"], began + max(fault["ends_at"] or 0.0, fault["at"] + fault["seconds"]))
        for fault in chaos.get("injected", ())
        if fault["kind"] in HOLDING_UP
        and fault["seconds"] is not None
        and replica_id in map(str, fault["victims"])
    ]


def summarize(times: Mapping[str, GroupTime]) -> dict[str, Any]:
    """Add the groups' times up to the run's goodput.

    Args:
        times: The account of each group; without any, the result is empty.
    """
    if not times:
        return {}
    groups = times.values()
    steps = sum(time.steps for time in groups)
    possible = sum(time.wall_s / time.pace_s for time in groups)
    outside = sum((time.wall_s - time.parts["dead"]) / time.pace_s for time in groups)
    thrown_away = sum(time.steps_thrown_away for time in groups)
    ends = sum(len(time.dead_s) for time in groups)
    return {
        "goodput": round(steps / possible, 4),
        "goodput_outside_faults": round(steps / outside, 4),
        "inner_steps": steps,
        "inner_steps_possible": round(possible, 1),
        "inner_steps_thrown_away": thrown_away,
        "group_seconds": round(sum(time.wall_s for time in groups), 3),
        "seconds": {part: round(sum(t.parts[part] for t in groups), 3) for part in PARTS},
        "costs": {
            "inner_step_s": median(time.pace_s for time in groups),
            "sync_s": _middle(time.sync_s for time in groups),
            "wait_s": _middle(time.wait_s for time in groups),
            "dead_s": _middle(time.dead_s for time in groups),
            "starting_s": _middle(time.starting_s for time in groups),
            "inner_steps_thrown_away": thrown_away / ends if ends else None,
            "ends": ends,
        },
        "groups": {
            id: {
                "goodput": round(time.steps * time.pace_s / time.wall_s, 4),
                "inner_step_s": time.pace_s,
                "seconds": {part: round(seconds, 3) for part, seconds in time.parts.items()},
            }
            for id, time in times.items()
        },
    }


def _middle(values: Any) -> float | None:
    all_of_them = list(chain.from_iterable(values))
    return median(all_of_them) if all_of_them else None


def describe_goodput(goodput: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The goodput as rows of a name and a value, for people.

    Args:
        goodput: What ``measure_goodput`` has returned.
    """
    if not goodput:
        return []
    seconds, total = goodput["seconds"], goodput["group_seconds"]
    text = f"{goodput['goodput']:.1%}"
    if seconds["dead"] > 0:
        text += f" ({goodput['goodput_outside_faults']:.1%} of the time that faults left)"
    parts = [f"{n.replace('_', ' ')} {s / total:.1%}" for n, s in seconds.items() if s]
    return [("goodput", text), ("the groups' time", ", ".join(parts))]
