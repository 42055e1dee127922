"""A run's folder, and what a replica group writes into it. Imports neither torch nor Composer."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
STATUS = "status.json"
RESULT = "result.json"
RESUMES = "resumes.jsonl"
STOP = "STOP"
"""A file of this name in the run's folder ends training at the next sync, in all groups."""

STATUS_EVERY_S = 0.5


def make_run_folder(config: dict[str, Any], config_path: str | Path) -> Path:
    """Make the run's folder: ``run_dir``, or ``runs/<config>-<time>``.

    With ``autoresume`` a run that is in it goes on.

    Raises:
        ValueError: There is a run in it, or it is no folder.
    """
    default = Path("runs") / f"{Path(config_path).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = Path(config.get("run_dir") or default).absolute()
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir={str(run_dir)!r} is a file: name a new folder")
    written = (SUMMARY, f"replica_*/{METRICS}", f"replica_*/{RESULT}")
    goes_on = bool(config.get("autoresume"))
    if not goes_on and any(path for pattern in written for path in run_dir.glob(pattern)):
        raise ValueError(
            f"run_dir={str(run_dir)!r} holds a run already: continue it (autoresume=true with a "
            "save_folder), give another run_dir=..., leave it out for a new folder below runs/, or "
            "remove that one"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    # What is left of a start that failed, or of the end of the run that goes on, is not the new
    # one's. Metrics and logs stay.
    for pattern in (SUMMARY, STOP, f"replica_*/{RESULT}"):
        for path in run_dir.glob(pattern):
            path.unlink()
    for path in run_dir.glob(f"replica_*/{STATUS}"):
        if goes_on:  # it says how far the group had come
            path.write_text(json.dumps(json.loads(path.read_text()) | {"phase": "starting"}))
        else:
            path.unlink()
    return run_dir


def log_path(run_dir: Path, replica_id: str | int) -> Path:
    """Where the output of a group that was launched goes."""
    return run_dir / f"replica_{replica_id}" / "log.txt"


def last_outer_step(run_dir: str | Path | None) -> int:
    """Outer steps that the groups of a run have made by now, as its folder says; 0 without one."""
    paths = [] if run_dir is None else Path(run_dir).glob(f"replica_*/{METRICS}")
    lines = (line for path in paths if (line := _last_line(path)))
    return max((int(line["diloco/outer_step"]) for line in lines), default=0)


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file of JSON lines: its writer may have been killed in the next."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**14))
        whole, _, _ = file.read().rpartition(b"\n")
    return json.loads(whole.rpartition(b"\n")[2]) if whole else None


class ReplicaFolder:
    """The folder ``<run_dir>/replica_<id>``.

    * ``metrics.jsonl``: one line a committed sync;
    * ``status.json``: where the group is, replaced about twice a second;
    * ``resumes.jsonl``: one line each time it continued from a checkpoint: where, and how many
      batches and outer steps since then are made again;
    * ``result.json``: how it ended.

    Args:
        run_dir: The run's folder; None writes nothing.
        replica_id: Of this group.
    """

    def __init__(self, run_dir: str | Path | None, replica_id: str | int) -> None:
        self._folder = None if run_dir is None else Path(run_dir) / f"replica_{replica_id}"
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._phase = ""
        self._status_due = 0.0

    @property
    def asks_to_stop(self) -> bool:
        """Whether somebody has put a file ``STOP`` into the run's folder."""
        return self._folder is not None and (self._folder.parent / STOP).exists()

    def append_sync(self, line: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        self._append(METRICS, line)

    def reached(self) -> dict[str, int]:
        """How far the group has come, before it was stopped: ``batch`` and ``outer_step``."""
        if self._folder is None:
            return {}
        line = _last_line(self._folder / METRICS) if (self._folder / METRICS).exists() else None
        path = self._folder / STATUS
        status = json.loads(path.read_text()) if path.exists() else {}
        return {
            "batch": max(int(status.get("batch") or 0), line["batch"] if line else 0),
            "outer_step": int(line["diloco/outer_step"]) if line else 0,
        }

    def append_resume(self, line: dict[str, Any]) -> None:
        """Append a line to ``resumes.jsonl``."""
        self._append(RESUMES, line)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._folder is not None:
            with (self._folder / name).open("ab+") as file:
                # A line that its writer was killed in must not swallow this one.
                file.seek(0, os.SEEK_END)
                if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                    file.write(b"\n")
                file.write(json.dumps(line).encode() + b"\n")

    def write_status(self, phase: str, **progress: float | None) -> None:
        """Replace ``status.json``; within a phase not more often than ``STATUS_EVERY_S``."""
        now = time.monotonic()
        if phase != self._phase or now >= self._status_due:
            self._phase, self._status_due = phase, now + STATUS_EVERY_S
            self._replace(STATUS, {"phase": phase, **progress})

    def write_result(self, result: dict[str, Any]) -> None:
        """Replace ``result.json``."""
        self._replace(RESULT, result)

    def _replace(self, name: str, content: dict[str, Any]) -> None:
        if self._folder is not None:
            draft = self._folder / f".{name}"
            draft.write_text(json.dumps(content))
            os.replace(draft, self._folder / name)  # a reader never sees half a file
