"""What a run's folder says for the page, and the page of a run as one file."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.coordinator.page import (
    MAX_POINTS,
    PAGE_DATA,
    agreement_of,
    finite,
    with_record,
    write_report_html,
)
from composer_replication.group.run_folder import (
    CONFIG,
    EVENTS,
    OUTER_STEP,
    STATUS,
    SUMMARY,
    SYNC,
    last_event,
    log_path,
)
from composer_replication.group.words import plural
from composer_replication.launch.run_record import GroupEvents, Run, read_run, thin_out
from composer_replication.replica.json_files import read_json

MAX_EVENTS = 100
"""Most events of the folder on the page: the newest."""

MAX_DIGESTS = 1000


class RunRecord:
    """Reads a run's folder for the page, and no more often than it can afford.

    The page asks every second. A long run's events take seconds to read, so they are read again
    when that has taken at most a twentieth of the time since.

    Args:
        run_dir: The run's folder.

    Attributes:
        run_dir: The same.
    """

    AT_MOST_EVERY_S = 2.0

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._lock = threading.Lock()
        self._newest: Mapping[str, Any] = {}
        self._due = 0.0

    def __call__(self) -> Mapping[str, Any]:
        """Return the newest record; empty before a group has written anything."""
        with self._lock:
            began = time.monotonic()
            if began >= self._due:
                self._newest = read_record(self.run_dir)
                now = time.monotonic()
                self._due = now + max(self.AT_MOST_EVERY_S, 20 * (now - began))
            return self._newest


def read_record(run_dir: Path) -> dict[str, Any]:
    """Read what a run's folder adds to the page's data, see ``with_record``.

    Args:
        run_dir: The run's folder.

    Returns:
        ``run_name``, ``groups``, ``losses`` (means over a round), ``agreement``, ``evaluations``
        and ``events``; empty if no group has written anything.
    """
    try:
        return finite(_record_of(read_run(run_dir)))
    except FileNotFoundError:
        return {}


def _record_of(run: Run) -> dict[str, Any]:
    record: dict[str, Any] = {"run_name": run.run_dir.resolve().name, "groups": {}}
    losses, digests = {}, {}
    events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
    for id, group in run.metrics.items():
        columns = {"inner_share": group.inner_share, "error": _error_of(group)}
        # What the folder does not know yet, a heartbeat may know.
        record["groups"][id] = {name: v for name, v in columns.items() if v is not None}
        events_of_group = deque(_events_of(id, group), maxlen=MAX_EVENTS)
        syncs = _noted(group, id, digests, events_of_group)
        drawn = thin_out(syncs, ("batch", "loss"), MAX_POINTS)
        losses[id] = [[line["batch"], line.get("loss")] for line in drawn if "batch" in line]
        if id in run.results:
            digests.setdefault(run.results[id]["outer_steps"], {})[id] = run.digests[id]
        events.extend(events_of_group)
        events = deque(sorted(events, key=lambda event: event["time"]), maxlen=MAX_EVENTS)
    if any(losses.values()):
        record["losses"] = losses
    agreement = agreement_of(digests)
    if agreement is not None:
        record["agreement"] = agreement
    # All groups evaluate the same global parameters.
    longest = max((group.evaluations for group in run.metrics.values()), key=len)
    record["evaluations"] = [{"batch": e["batch"], "eval": e["eval"]} for e in longest[-50:]]
    return record | {"events": list(events)}


def _error_of(group: GroupEvents) -> str | None:
    """The error with which a group ended, unless it has started again."""
    started = max((start["time"] for start in group.starts), default=0.0)
    newest = [error["error"] for error in group.errors if error["time"] >= started]
    return newest[-1] if newest else None


def _events_of(id: str, group: GroupEvents) -> Iterator[dict[str, Any]]:
    happened: list[tuple[float, str]] = []
    for before, start in zip([{}, *group.starts], group.starts, strict=False):
        if start["trained_at"] is not None and start["started"] != before.get("started"):
            happened.append((start["trained_at"], "was lost"))
        happened.append((start["joined"], "joined"))
    happened += [(line["time"], f"resumed at batch {line['batch']}") for line in group.resumes]
    happened += [(line["time"], f"ended with an error: {line['error']}") for line in group.errors]
    return ({"time": at, "text": f"replica group {id} {text}"} for at, text in sorted(happened))


def _noted(
    group: GroupEvents, id: str, digests: dict[int, dict[str, str]], events: deque[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The syncs of a group; notes their digests, and what was unusual about them."""
    for line in group:
        step = line[OUTER_STEP]
        if line.get("diloco/global_digest"):
            digests.setdefault(step, {})[id] = line["diloco/global_digest"]
            if len(digests) > MAX_DIGESTS:
                del digests[min(digests)]
        text = _trouble_of(line)
        if text:
            text = f"replica group {id}, outer step {step}: {text}"
            events.append({"time": line.get("time", 0.0), "text": text})
        yield line


def _trouble_of(line: Mapping[str, Any]) -> str:
    """What was unusual about a sync; empty if nothing was."""
    retries, lost = int(line.get("diloco/retries", 0)), int(line.get("diloco/steps_lost", 0))
    parts = [
        "loaded the state of the others" if line.get("diloco/healed") else "",
        f"{plural(retries, 'retry', 'retries')} of the sync" if retries else "",
        f"{plural(lost, 'inner step')} thrown away" if lost else "",
    ]
    return ", ".join(filter(None, parts))


def write_page(run_dir: Path) -> Path:
    """Write ``report.html``: the page of a run with its data inside.

    It has what the page showed last, if the coordinator served this folder, and what the groups
    have written.

    Args:
        run_dir: The run's folder.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: The folder holds no run.
        OSError: The page cannot be written.
    """
    run = read_run(run_dir)
    record = _record_of(run)
    for id, columns in record["groups"].items():
        columns |= _ended_group(run, id)
    shown = read_json(run_dir / PAGE_DATA) or {"version": __version__}  # it was killed, or away
    data = with_record({"replicas": [], "events": [], **shown}, record)
    saved = {"written": time.time(), "files": _files_of(run)}
    return write_report_html(run_dir, data | {"outer_step": run.outer_steps, "report": saved})


def _ended_group(run: Run, id: str) -> dict[str, Any]:
    """A group's columns when its processes have ended."""
    status = read_json(log_path(run.run_dir, id).with_name(STATUS))
    if id in run.results:
        status["phase"] = "finished"
    sync = last_event(log_path(run.run_dir, id).with_name(EVENTS), SYNC)
    named = {name: f"diloco/{name}" for name in ("num_participants", "sync_seconds")}
    newest = {name: sync[key] for name, key in named.items() if key in sync}
    return {**status, **newest, "is_alive": False, "last_seen_s": None}


def _files_of(run: Run) -> list[str]:
    names = [SUMMARY, CONFIG, *(f"replica_{id}/log.txt" for id in run.metrics)]
    return [name for name in names if (run.run_dir / name).exists()]
