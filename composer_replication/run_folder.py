"""What a replica group writes into the run's folder. Imports neither torch nor Composer."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
STATUS = "status.json"
RESULT = "result.json"
STOP = "STOP"
"""A file of this name in the run's folder ends training at the next sync, in all groups."""

STATUS_EVERY_S = 0.5


def log_path(run_dir: Path, replica_id: str | int) -> Path:
    """Where the output of a group that was launched goes."""
    return run_dir / f"replica_{replica_id}" / "log.txt"


class ReplicaFolder:
    """The folder ``<run_dir>/replica_<id>``.

    * ``metrics.jsonl``: one line a committed sync;
    * ``status.json``: where the group is, replaced about twice a second;
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
        if self._folder is not None:
            with (self._folder / METRICS).open("a") as file:
                file.write(json.dumps(line) + "\n")

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
