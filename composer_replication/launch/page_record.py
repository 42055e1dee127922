"""What a run's folder says for the status page, and the page of a finished run as one file."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_replication import __version__
from composer_replication.callback.run_folder import (
    CHAOS,
    CONFIG,
    EVENTS,
    STATUS,
    SUMMARY,
    SYNC,
    last_event,
    log_path,
)
from composer_replication.coordinator.page import PAGE_DATA, write_report_html
from composer_replication.coordinator.run_history import OF_A_SYNC
from composer_replication.diloco.arguments import pick
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.run_marks import lives_of, marks_of
from composer_replication.launch.run_record import Run, read_run, thin_out
from composer_replication.replica.json_files import read_json
from composer_replication.training.config import ConfigError, diloco_section
from composer_replication.training.settings_file import load_settings

MAX_POINTS = 1000
"""Most syncs of a group on the page. Of a longer run, evenly spaced ones are shown."""

_SYNC = (*(f"diloco/{name}" for name in OF_A_SYNC), "batch", "time")
_DRAWN = ("diloco/outer_step", "loss", *_SYNC)


class RunRecord:
    """Reads a run's folder for the status page, and no more often than it can afford.

    The page asks every second. A long run's metrics take seconds to read, so they are read again
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
        """Return the newest record; empty before the first sync."""
        with self._lock:
            began = time.monotonic()
            if began >= self._due:
                self._newest = read_record(self.run_dir)
                now = time.monotonic()
                self._due = now + max(self.AT_MOST_EVERY_S, 20 * (now - began))
            return self._newest


def read_record(run_dir: Path) -> dict[str, Any]:
    """Read what a run's folder adds to the page's data.

    Args:
        run_dir: The run's folder.

    Returns:
        Keys of ``/v1/page``: ``run_name``, ``losses`` (means over a round), ``syncs``, ``lives``
        and ``marks``; empty if no group has committed a sync.
    """
    try:
        return _record_of(read_run(run_dir))
    except FileNotFoundError:
        return {}


def _record_of(run: Run) -> dict[str, Any]:
    drawn = {id: thin_out(lines, _DRAWN, MAX_POINTS) for id, lines in run.metrics.items()}
    if not any(drawn.values()):
        return {}
    longest = max(drawn.values(), key=len)  # the other groups have the same about each sync
    return {
        "run_name": run.run_dir.resolve().name,
        "losses": {
            id: [[line["batch"], line.get("loss")] for line in lines if "batch" in line]
            for id, lines in drawn.items()
        },
        "syncs": [_sync_of(line) for line in longest],
        "lives": {id: lives_of(run, id) for id in run.metrics},
        "marks": marks_of(run),
    }


def _sync_of(line: Mapping[str, Any]) -> dict[str, Any]:
    sync = {name.removeprefix("diloco/"): line[name] for name in _SYNC if name in line}
    return {"outer_step": line["diloco/outer_step"], **sync}


def write_page(run_dir: Path) -> Path:
    """Write ``report.html``: the status page of a run with its data inside.

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
    shown = read_json(run_dir / PAGE_DATA) or _without_coordinator(run)
    replicas = {str(group["replica_id"]): group for group in shown.get("replicas", ())}
    data = shown | _record_of(run)
    data["replicas"] = [_ended_group(run, id, replicas.get(id, {})) for id in run.metrics]
    data["outer_step"] = run.outer_steps
    data["report"] = {"written": time.time(), "files": _files_of(run)}
    return write_report_html(run_dir, data)


def _without_coordinator(run: Run) -> dict[str, Any]:
    """The page's data of a run that left no ``page.json``: its coordinator was killed or away."""
    try:
        config, _ = load_settings(run.run_dir / CONFIG)
        settings = asdict(pick(DiLoCoSettings, diloco_section(config)))
    except (ConfigError, ValueError):  # a script of the user's own leaves no config
        settings = {}
    return {"version": __version__, "settings": settings}


def _ended_group(run: Run, id: str, shown: Mapping[str, Any]) -> dict[str, Any]:
    """A group's row of the page when its processes have ended."""
    status = read_json(log_path(run.run_dir, id).with_name(STATUS))
    if id in run.results:
        status["phase"] = "finished"
    last = last_event(log_path(run.run_dir, id).with_name(EVENTS), SYNC)
    newest = {name: last[key] for name in ("contribution", *OF_A_SYNC)
              if (key := f"diloco/{name}") in last}  # fmt: skip
    return {
        **shown,
        **status,
        **newest,
        "replica_id": id,
        "registrations": len(run.starts[id]) or shown.get("registrations"),
        "is_alive": False,
        "last_seen_s": None,
        "seconds_since_sync": None,
    }


def _files_of(run: Run) -> list[str]:
    names = [SUMMARY, CONFIG, CHAOS]
    names += [f"replica_{id}/{name}" for id in run.metrics for name in (EVENTS, "log.txt")]
    return [name for name in names if (run.run_dir / name).exists()]
