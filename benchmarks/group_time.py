"""Accounts for the wall-clock time of one replica group, from what it wrote into its folder."""

from __future__ import annotations

import heapq
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.group.run_folder import OUTER_STEP

PARTS = ("training", "syncs", "waiting", "starting", "thrown_away", "dead", "other")
"""Where the time of a group goes.

``training``: the inner steps that are in the model, at the undisturbed pace. ``syncs``: blocked by
a sync after its quorum had formed. ``waiting``: blocked until then. ``starting``: from the start of
a process that replaces another to its first inner step. ``thrown_away``: inner steps that are not
in the model. ``dead``: from the last moment in which a group trained to the start of its next
process, and what a lasting fault kept it from training. ``other``: the rest, such as evaluations;
below 0 if steps were faster in the mean than in the median.
"""

Window = tuple[float, float]
"""Begin and end of a fault, in seconds since the epoch."""


@dataclass
class GroupTime:
    """Where the wall-clock time of a replica group went.

    Attributes:
        pace_s: Undisturbed seconds of an inner step: the median over the times between two syncs.
        wall_s: Seconds from the group's first inner step to its end, without the time in which the
            whole run was stopped.
        steps: Inner steps that are in the final model.
        steps_thrown_away: Inner steps that were trained and are not.
        parts: Seconds of each of ``PARTS``; together ``wall_s``.
        sync_s: For each sync, the seconds that it blocked training after its quorum had formed.
        wait_s: For each sync, the seconds until then.
        dead_s: For each process that ended early, the seconds from then to the start of the next.
        starting_s: For each of these next processes, the seconds from its start to its first inner
            step.
    """

    pace_s: float
    wall_s: float = 0.0
    steps: int = 0
    steps_thrown_away: int = 0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    sync_s: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    dead_s: list[float] = field(default_factory=list)
    starting_s: list[float] = field(default_factory=list)


@dataclass
class _Interval:
    """The time between two syncs of a process, or from its first inner step to its first sync.

    Attributes:
        line: The sync at its end, as in ``events.jsonl``.
        began: When it began, in seconds since the epoch.
        steps: Inner steps in it.
        elapsed_s: Its length in seconds.
        blocked_s: Seconds of it in which a sync blocked training.
        waited_s: Seconds of these until the sync had a quorum.
        free_s: Seconds in which no sync blocked training.
    """

    line: Mapping[str, Any]
    began: float
    steps: int
    elapsed_s: float = field(init=False)
    blocked_s: float = field(init=False)
    waited_s: float = field(init=False)
    free_s: float = field(init=False)

    def __post_init__(self) -> None:
        line = self.line
        self.elapsed_s = max(0.0, line["time"] - self.began)  # a clock may be set back
        # The first sync of a joiner is a part of its start, and reports more than this time.
        self.blocked_s = min(line["diloco/sync_seconds"], self.elapsed_s)
        self.waited_s = min(line["diloco/wait_seconds"], self.blocked_s)
        self.free_s = self.elapsed_s - self.blocked_s


def account(
    starts: Sequence[Mapping[str, Any]],
    syncs: Iterable[Mapping[str, Any]],
    *,
    faults: Sequence[Window] = (),
    end: float | None = None,
    trained_at: float | None = None,
) -> GroupTime | None:
    """Account for the time of a group, from its first inner step to its end.

    Args:
        starts: The starts in ``events.jsonl``: a process's start and its first inner step.
        syncs: The syncs in ``events.jsonl``, in their order.
        faults: When faults held the group up without ending it.
        end: When the run ended, in seconds since the epoch, for a group that has not finished.
            None: the group has finished with its last sync.
        trained_at: When a group that has not finished trained last.

    Returns:
        The account. None: the group has made no inner step between two syncs.
    """
    pace_s = _pace(starts, syncs)
    if pace_s is None:
        return None
    time = GroupTime(pace_s)
    rewinds = list(_rewinds(starts, syncs))
    position, steps, index = starts[0]["joined"], starts[0]["inner_steps"], 0
    for event in _events(starts[1:], syncs):
        if "joined" in event:
            _add_start(time, event, position, steps)
            position, steps = event["joined"], event["inner_steps"]
            continue
        interval = _Interval(event, position, event["inner_steps"] - steps)
        kept = [b for i, step, b in rewinds if index < i and step <= event[OUTER_STEP]]
        undone = min(interval.steps, max(0, event["inner_steps"] - min(kept))) if kept else 0
        _add_interval(time, interval, faults, undone)
        position, steps, index = position + interval.elapsed_s, event["inner_steps"], index + 1
    if end is not None and end > position:
        lived_until = min(max(trained_at or position, position), end)
        time.parts["thrown_away"] += lived_until - position
        time.parts["dead"] += end - lived_until
        time.wall_s += end - position
    return time


def _events(
    starts: Sequence[Mapping[str, Any]], syncs: Iterable[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Starts and syncs in the order of their times. A process's start precedes its syncs."""
    return heapq.merge(starts, syncs, key=lambda event: event.get("joined", event.get("time")))


def _pace(starts: Sequence[Mapping[str, Any]], syncs: Iterable[Mapping[str, Any]]) -> float | None:
    if not starts:
        return None
    paces = array("d")
    position, steps = starts[0]["joined"], starts[0]["inner_steps"]
    for event in _events(starts[1:], syncs):
        if "joined" not in event:
            interval = _Interval(event, position, event["inner_steps"] - steps)
            if interval.steps > 0 and interval.free_s > 0:
                paces.append(interval.free_s / interval.steps)
        position, steps = event.get("joined", event.get("time")), event["inner_steps"]
    return statistics.median(paces) if paces else None


def _rewinds(
    starts: Sequence[Mapping[str, Any]], syncs: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[int, int, int]]:
    """Where a group makes outer steps again, because all groups have resumed from a checkpoint.

    Yields:
        The number of the sync, its outer step, and the inner steps in the checkpoint.
    """
    outer_step = index = steps = 0
    for event in _events(starts, syncs):
        if "joined" in event:
            steps = event["inner_steps"]
            continue
        if event[OUTER_STEP] <= outer_step:
            yield index, event[OUTER_STEP], steps
        outer_step, index = event[OUTER_STEP], index + 1


def _add_start(time: GroupTime, start: Mapping[str, Any], position: float, steps: int) -> None:
    """Add the end of a process and the start of the next one."""
    joined = max(start["joined"], position)
    started = min(max(start["started"], position), joined)
    time.parts["starting"] += joined - started
    time.wall_s += joined - started
    time.steps_thrown_away += max(0, start["steps_before"] - steps)
    if start["trained_at"] is None:  # the whole run was stopped, and continued later
        return
    lived_until = min(max(start["trained_at"], position), started)
    if started > position:  # else it is a further fit of the same process
        time.starting_s.append(joined - started)
        time.dead_s.append(started - lived_until)
    time.parts["thrown_away"] += lived_until - position
    time.parts["dead"] += started - lived_until
    time.wall_s += started - position


def _add_interval(
    time: GroupTime, interval: _Interval, faults: Sequence[Window], undone: int
) -> None:
    # With several fragments steps_lost may reach back to steps that other fragments have synced.
    lost = undone or min(interval.line["diloco/steps_lost"], interval.steps)
    until = interval.began + interval.elapsed_s
    blocked_since = until - interval.blocked_s
    spent = {
        "other": interval.free_s - interval.steps * time.pace_s,
        "waiting": interval.waited_s,
        "syncs": interval.blocked_s - interval.waited_s,
    }
    if interval.blocked_s:
        time.sync_s.append(spent["syncs"])
        time.wait_s.append(spent["waiting"])
    # While a fault held the group up, the time in which it did not train is the fault's.
    for names, overlap in (
        (("other",), _overlap(faults, interval.began, blocked_since)),
        (("waiting", "syncs"), _overlap(faults, blocked_since, until)),
    ):
        for part in names:
            dead = min(max(0.0, spent[part]), overlap)
            overlap -= dead
            time.parts["dead"] += dead
            time.parts[part] += spent[part] - dead
    time.steps += interval.steps - lost
    time.steps_thrown_away += lost
    time.parts["training"] += (interval.steps - lost) * time.pace_s
    time.parts["thrown_away"] += lost * time.pace_s
    time.wall_s += interval.elapsed_s


def _overlap(faults: Sequence[Window], began: float, until: float) -> float:
    return sum(max(0.0, min(until, b) - max(began, a)) for a, b in faults)
