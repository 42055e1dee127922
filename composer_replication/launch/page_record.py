"""What a run's folder says for the page, and the page of a run as one file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.coordinator.page import (
    PAGE_DATA,
    finite,
    with_record,
    write_report_html,
)
from composer_replication.group import run_folder
from composer_replication.group.run_folder import START
from composer_replication.launch.group import MAX_EVENTS, Group
from composer_replication.launch.run_record import Run, result_of
from composer_replication.replica.json_files import read_json


class RunRecord:
    """Reads a run's folder for the page: each time only what is new.

    Args:
        run_dir: The run's folder.

    Attributes:
        run_dir: The same.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._run = Run(run_dir)
        self._lock = threading.Lock()

    def __call__(self) -> dict[str, Any]:
        """Return what the folder adds to the page's data, see ``with_record``.

        Returns:
            ``run_name``, ``result`` (rows of a name and a value), ``groups``, ``losses`` (means
            over a round), ``agreement``, ``evaluations`` and ``events``; empty if no group has
            written anything.
        """
        with self._lock:  # several pages may ask at once
            self._run.read()
            return finite(_record_of(self._run)) if self._run.groups else {}


def _record_of(run: Run) -> dict[str, Any]:
    groups = run.groups
    record: dict[str, Any] = {"run_name": run.run_dir.resolve().name, "groups": {}}
    for id, group in groups.items():
        columns = {"inner_share": group.inner_share, "error": _error_of(group)}
        # What the folder does not know yet, a heartbeat may know.
        record["groups"][id] = {name: v for name, v in columns.items() if v is not None}
    losses = {id: group.losses.points for id, group in groups.items()}
    if any(losses.values()):
        record["losses"] = losses
    agreement = run.agreement(groups.values())
    if agreement is not None:
        record["agreement"] = agreement
    # All groups evaluate the same global parameters.
    longest = max((group.others[run_folder.EVALUATION] for group in groups.values()), key=len)
    record["evaluations"] = [{"batch": e["batch"], "eval": e["eval"]} for e in longest[-50:]]
    events = sorted(chain.from_iterable(map(_events_of, groups.values())))
    record["result"] = [[*row] for row in result_of(run)]
    return record | {"events": [{"time": at, "text": text} for at, text in events[-MAX_EVENTS:]]}


def _error_of(group: Group) -> str | None:
    """The error with which a group ended, unless it has started again."""
    started = max((start["time"] for start in group.others[START]), default=0.0)
    newest = [error["error"] for error in group.errors if error["time"] >= started]
    return newest[-1] if newest else None


def _events_of(group: Group) -> Iterator[tuple[float, str]]:
    name = f"replica group {group.name}"
    starts = group.others[START]
    for before, start in zip([{}, *starts], starts, strict=False):
        if start["trained_at"] is not None and start["started"] != before.get("started"):
            yield start["trained_at"], f"{name} was lost"
        yield start["joined"], f"{name} joined"
    for line in group.others[run_folder.RESUME]:
        yield line["time"], f"{name} resumed at batch {line['batch']}"
    for line in group.errors:
        yield line["time"], f"{name} ended with an error: {line['error']}"
    for at, text in group.troubles:
        yield at, f"{name}, {text}"


def write_page(run: Run) -> Path:
    """Write ``report.html``: the page of a run with its data inside.

    It has what the page showed last, if the coordinator served this folder, and what the groups
    have written.

    Args:
        run: The run.

    Returns:
        The path of the page.

    Raises:
        OSError: The page cannot be written.
    """
    record = _record_of(run)
    for id, columns in record["groups"].items():
        columns |= _ended_group(run, id)
    shown = read_json(run.run_dir / PAGE_DATA) or {"version": __version__}  # it was killed, or away
    data = with_record({"replicas": [], "events": [], **shown}, record)
    saved = {"written": time.time(), "files": _files_of(run)}
    return write_report_html(run.run_dir, data | {"outer_step": run.outer_steps, "report": saved})


def _ended_group(run: Run, id: str) -> dict[str, Any]:
    """A group's columns when its processes have ended."""
    status = run.groups[id].status
    if id in run.results:
        status["phase"] = "finished"
    return {**status, "metrics": run.groups[id].newest, "is_alive": False, "last_seen_s": None}


def _files_of(run: Run) -> list[str]:
    names = [
        run_folder.SUMMARY,
        run_folder.CONFIG,
        *(f"replica_{id}/log.txt" for id in run.groups),
    ]
    return [name for name in names if (run.run_dir / name).exists()]
