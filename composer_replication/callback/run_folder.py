"""A run's folder, and the files of its replica groups. Imports neither torch nor Composer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from composer_replication.replica.folder_lock import lock_folder
from composer_replication.replica.json_files import (
    JsonLineWriter,
    read_json,
    read_last_line,
    replace_json,
)

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
LOCK = "launch.lock"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
STATUS = "status.json"
RESULT = "result.json"
RESUMES = "resumes.jsonl"
STARTS = "starts.jsonl"
CHAOS = "chaos.json"
"""What happened to a run under injected faults."""
STOP = "STOP"
"""A file of this name in the run's folder ends training at the next sync, in all groups."""

REJECTED = "rejected"
"""The phase of a group that ended because it, or the coordinator, has rejected its settings."""

STATUS_EVERY_S = 0.5
WARN_EVERY_S = 60.0
"""How often a warning says that a file cannot be written, in seconds."""

OUTER_STEP = "diloco/outer_step"


def make_run_folder(config: dict[str, Any], config_path: str | Path) -> Path:
    """Make the run's folder: ``run_dir``, or ``runs/<config>-<time>``.

    With ``autoresume`` the run in that folder is continued. The folder is locked until this process
    ends.

    Args:
        config: The config of the run.
        config_path: The file that it is from.

    Raises:
        ValueError: The folder contains a run, another process uses it, or it is a file.
    """
    if config.get("run_dir"):
        run_dir = Path(config["run_dir"]).absolute()
        if run_dir.exists() and not run_dir.is_dir():
            raise ValueError(f"run_dir={str(run_dir)!r} is a file: name a new folder")
        run_dir.mkdir(parents=True, exist_ok=True)
    else:
        run_dir = _make_new_folder(Path("runs").absolute(), Path(config_path).stem)
    lock_folder(run_dir, LOCK, "give another run_dir=...")
    written = (SUMMARY, f"replica_*/{METRICS}", f"replica_*/{RESULT}")
    resumes = bool(config.get("autoresume"))
    if not resumes and any(path for pattern in written for path in run_dir.glob(pattern)):
        raise ValueError(
            f"run_dir={str(run_dir)!r} holds a run already: continue it (autoresume=true with a "
            "save_folder), give another run_dir=..., leave it out for a new folder below runs/, or "
            "remove that one. A command of your own is continued with --resume"
        )
    # Results of a start that failed, or of the earlier part of a run that is continued, are not
    # those of this start. Metrics and logs are kept.
    for pattern in (SUMMARY, STOP, f"replica_*/{RESULT}"):
        for path in run_dir.glob(pattern):
            path.unlink()
    for path in run_dir.glob(f"replica_*/{STATUS}"):
        if resumes:  # it contains the position that the group had reached
            status = read_json(path) | {"phase": "starting"}
            status.pop("trained_at", None)  # the time since then is no time of the run
            replace_json(path, status)
        else:
            path.unlink()
    return run_dir


def _make_new_folder(parent: Path, name: str) -> Path:
    """Make a folder for this run alone, also if two runs start in the same second."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("there is always a next number")


def log_path(run_dir: Path, replica_id: str | int) -> Path:
    """Return the file for the output of a group that was launched."""
    return run_dir / f"replica_{replica_id}" / "log.txt"


def last_outer_step(run_dir: str | Path | None) -> int:
    """Return how many outer steps the groups of a run have made, from its folder; 0 without one.

    Raises:
        OSError: The folder cannot be read.
    """
    paths = [] if run_dir is None else Path(run_dir).glob(f"replica_*/{METRICS}")
    return max((int(read_last_line(path).get(OUTER_STEP, 0)) for path in paths), default=0)


class ReplicaFolder:
    """The folder ``<run_dir>/replica_<id>``.

    * ``metrics.jsonl``: one line per committed sync;
    * ``status.json``: the position in training, replaced about twice a second;
    * ``resumes.jsonl``: one line for each resume from a checkpoint: at which batch, and how many
      batches and outer steps are repeated;
    * ``starts.jsonl``: one line for each time that the group has joined: when its process started,
      when it joined, and how far the one before it had come;
    * ``result.json``: the result at the end.

    A full or broken disk does not end training: lines wait in memory until there is space, a status
    is dropped, and a warning is logged once a minute. Only a result that cannot be written is an
    error.

    Args:
        run_dir: The run's folder; None writes nothing.
        replica_id: The id of this group.

    Raises:
        PermissionError: The folder may not be created at this path.
        NotADirectoryError: ``run_dir`` is a file.
    """

    def __init__(self, run_dir: str | Path | None, replica_id: str | int) -> None:
        self._folder = None if run_dir is None else Path(run_dir) / f"replica_{replica_id}"
        self._phase = ""
        self._status_due = 0.0
        self._warning_due = 0.0
        self._lines: dict[str, JsonLineWriter] = {}
        if self._folder is None:
            return
        self._lines = {
            name: JsonLineWriter(self._folder / name) for name in (METRICS, RESUMES, STARTS)
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (PermissionError, NotADirectoryError, FileExistsError):
            raise  # the folder's name is wrong, and no group waits for this one yet
        except OSError as error:
            self._warn(error)

    @property
    def asks_to_stop(self) -> bool:
        """Whether the run's folder contains a file ``STOP``."""
        return self._folder is not None and os.path.exists(self._folder.parent / STOP)

    def append_sync(self, line: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        self._append(METRICS, line)

    def reached(self) -> dict[str, int]:
        """Return the ``batch`` and ``outer_step`` that the group had reached before it stopped."""
        if self._folder is None:
            return {}
        status, line = self.read_status(), {}
        try:
            line = read_last_line(self._folder / METRICS)
        except OSError as error:
            self._warn(error)
        return {
            "batch": max(int(status.get("batch") or 0), int(line.get("batch") or 0)),
            "outer_step": int(line.get(OUTER_STEP) or 0),
        }

    def append_resume(self, line: dict[str, Any]) -> None:
        """Append a line to ``resumes.jsonl``."""
        self._append(RESUMES, line)

    def append_start(self, line: dict[str, Any]) -> None:
        """Record in ``starts.jsonl`` that a process of the group has joined the others."""
        self._append(STARTS, line)

    def read_status(self) -> dict[str, Any]:
        """Return what ``status.json`` says; empty without one."""
        return {} if self._folder is None else read_json(self._folder / STATUS)

    def write_status(self, phase: str, **progress: float | None) -> None:
        """Replace ``status.json``, at most every ``STATUS_EVERY_S`` seconds in one phase."""
        now = time.monotonic()
        if self._folder is None or (phase == self._phase and now < self._status_due):
            return
        self._phase, self._status_due = phase, now + STATUS_EVERY_S
        self._flush()
        try:
            replace_json(self._folder / STATUS, {"phase": phase, **progress})
        except OSError as error:
            self._warn(error)

    def write_rejection(self) -> None:
        """Say that the group ends because of its settings, and would do so again."""
        status = self.read_status()
        self.write_status(REJECTED, **{k: v for k, v in status.items() if k != "phase"})

    def write_result(self, result: dict[str, Any]) -> None:
        """Replace ``result.json``.

        Raises:
            OSError: It cannot be written.
        """
        if self._folder is None:
            return
        self._flush()
        path = self._folder / RESULT
        try:
            replace_json(path, result, survives_power_cut=True)
        except OSError as error:
            problem = f"{error.strerror}; training is complete and only its result is not written"
            raise OSError(
                error.errno, f"{problem}: free some space or repair the disk", path
            ) from error

    def _append(self, name: str, line: dict[str, Any]) -> None:
        if self._folder is not None:
            self._lines[name].append(line)
            self._flush()

    def _flush(self) -> None:
        for lines in self._lines.values():
            try:
                lines.flush()
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        now = time.monotonic()
        if now < self._warning_due:
            return
        self._warning_due = now + WARN_EVERY_S
        waiting = sum(lines.num_waiting for lines in self._lines.values())
        lost = sum(lines.num_lost for lines in self._lines.values())
        log.warning(
            "Cannot use %s (%s). Training continues; %d lines wait in memory until there is "
            "space, and %d older ones are lost",
            self._folder,
            error,
            waiting,
            lost,
        )
