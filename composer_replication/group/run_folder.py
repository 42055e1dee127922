"""A run's folder, and the files of its replica groups. Imports neither torch nor Composer."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from composer_replication.util.fence import fence
from composer_replication.util.json_files import (
    JsonLineReader,
    JsonLineWriter,
    hold_lock,
    read_json,
    replace_json,
)

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
LOCK = "launch.lock"
SUMMARY = "summary.json"
EVENTS = "events.jsonl"
"""The file with a group's events: one line each, with ``time`` and ``event``, its kind."""
STATUS = "status.json"
STOP = "STOP"
"""A file of this name in the run's folder ends training at the next sync, in all groups."""

START = "start"
RESUME = "resume"
SYNC = "sync"
EVALUATION = "evaluation"
ERROR = "error"
REJECTION = "rejection"
END = "end"
SAVED = "saved"
"""The kind of event for a state that a loop of one's own has taken, to write it where it likes."""
WARNING = "warning"
"""The kind of event for a warning about a group's settings, which ``launch`` shows."""
CONTINUED = "continued"
"""The event with which a stopped run is continued: an end before it is not the end of the run.
"""

REJECTED = "rejected"
"""The phase of a group that ended because it, or the coordinator, has rejected its settings."""

STATUS_EVERY_S = 0.5
WARN_EVERY_S = 60.0
"""How often a warning says that a file cannot be written, in seconds."""

OUTER_STEP = "diloco/outer_step"

OF_THE_PATH = (
    errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS,
)  # fmt: skip
"""Errors of a folder's path: it is a file or below one, or in no place where folders are made."""


def make_run_folder(config: Mapping[str, Any], config_path: str | Path) -> Path:
    """Make the run's folder: ``run_dir``, or ``runs/<config>-<time>``.

    With ``autoresume`` the run in that folder is continued. The folder is locked until this process
    ends.

    Args:
        config: The config of the run.
        config_path: The file that it is from.

    Raises:
        ValueError: The folder contains a run, another process uses it, or it cannot be made.
    """
    if config.get("run_dir"):
        run_dir = Path(config["run_dir"]).absolute()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in OF_THE_PATH:  # a full disk may have space again
                raise
            problem = f"run_dir={str(run_dir)!r} cannot be made ({error.strerror})"
            raise ValueError(f"{problem}: name a folder that this user can write") from error
    else:
        run_dir = _make_new_folder(Path("runs").absolute(), Path(config_path).stem)
    hold_lock(run_dir.resolve(), LOCK, "give another run_dir=...")
    events = list(run_dir.glob(f"replica_*/{EVENTS}"))
    resumes = bool(config.get("autoresume"))
    has_trained = any(last_event(path, SYNC, END) for path in events)
    if not resumes and (has_trained or (run_dir / SUMMARY).exists()):
        raise ValueError(
            f"run_dir={str(run_dir)!r} holds a run already: continue it (autoresume=true with a "
            "save_folder), give another run_dir=..., leave it out for a new folder below runs/, or "
            "remove that one. A command of your own is continued with --resume"
        )
    # The remains of a start that failed do not belong to this run. Nor do an end or a summary of
    # the earlier part of a run that is continued; its events and logs are kept.
    for path in (run_dir / SUMMARY, run_dir / STOP):
        path.unlink(missing_ok=True)
    statuses = run_dir.glob(f"replica_*/{STATUS}")
    if not resumes:
        for path in (*events, *statuses):
            path.unlink()
        return run_dir
    for path in events:
        writer = JsonLineWriter(path)
        writer.append({"time": time.time(), "event": CONTINUED})
        writer.flush()
    for path in statuses:  # with the position that the group had reached
        status = read_json(path) | {"phase": "starting"}
        # The run was stopped since then: that time does not count.
        status.pop("trained_at", None)
        replace_json(path, status)
    return run_dir


def _make_new_folder(parent: Path, name: str) -> Path:
    """Make a folder for this run alone, also if two runs start in the same second."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    path = parent / stem
    number = 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = parent / f"{stem}-{number}"


def log_path(run_dir: Path, replica_id: str | int) -> Path:
    """Return the file for the output of a group that was launched."""
    return run_dir / f"replica_{replica_id}" / "log.txt"


def last_event(path: Path, *kinds: str) -> dict[str, Any]:
    """Return the last event of these kinds in a group's ``events.jsonl``; empty without one.

    Raises:
        OSError: The file cannot be read.
    """
    last: dict[str, Any] = {}
    for line in JsonLineReader(path).read():
        if line.get("event") in kinds:
            last = line
    return last


def last_outer_step(run_dir: str | Path | None) -> int:
    """Return how many outer steps the groups of a run have made, from its folder; 0 without one.

    Raises:
        OSError: The folder cannot be read.
    """
    if run_dir is None:
        return 0
    syncs = (last_event(path, SYNC) for path in Path(run_dir).glob(f"replica_*/{EVENTS}"))
    return max((int(sync.get(OUTER_STEP, 0)) for sync in syncs), default=0)


class ReplicaFolder:
    """The folder ``<run_dir>/replica_<id>``.

    * ``events.jsonl``: one line for each event: a start, a resume from a checkpoint, a committed
      sync, an evaluation, a warning, an error, a rejection, the end with its result;
    * ``status.json``: the position in training, replaced about twice a second.

    A full or broken disk does not end training: lines wait in memory until there is space, a status
    is dropped, and a warning is logged once a minute.

    Args:
        run_dir: The run's folder; None writes nothing.
        replica_id: The id of this group.

    Attributes:
        replica_id: The same, as text.

    Raises:
        PermissionError: The folder may not be created at this path.
        NotADirectoryError: ``run_dir`` is a file.
        FileExistsError: A file has the folder's name.
    """

    def __init__(self, run_dir: str | Path | None, replica_id: str | int) -> None:
        self.replica_id = str(replica_id)
        self._folder = None if run_dir is None else Path(run_dir) / f"replica_{replica_id}"
        self._phase = ""
        self._status_due = 0.0
        self._warning_due = 0.0
        if self._folder is None:
            return
        self._events = JsonLineWriter(self._folder / EVENTS)
        # With these the folder's name is wrong, and no group waits for this one yet.
        with self._warnings(PermissionError, NotADirectoryError, FileExistsError):
            self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def asks_to_stop(self) -> bool:
        """Whether the run's folder contains a file ``STOP``."""
        return self._folder is not None and os.path.exists(self._folder.parent / STOP)

    @fence("an event of this group")
    def append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append an event to ``events.jsonl``.

        Args:
            event: Its kind.
            fields: The event's fields.
        """
        if self._folder is not None:
            self._events.append({"time": time.time(), "event": event, **fields})
            with self._warnings():
                self._events.flush()

    @fence("what this group had reached")
    def reached(self) -> dict[str, Any]:
        """Return the status that the group had before it stopped, with its last ``outer_step``."""
        if self._folder is None:
            return {}
        status = self.read_status()
        sync = {}
        with self._warnings():
            sync = last_event(self._folder / EVENTS, SYNC)
        batches = [int(each.get("batch") or 0) for each in (status, sync)]
        return status | {"batch": max(batches), "outer_step": int(sync.get(OUTER_STEP) or 0)}

    def read_status(self) -> dict[str, Any]:
        """Return what ``status.json`` says; empty without one."""
        return {} if self._folder is None else read_json(self._folder / STATUS)

    @fence("the position in training")
    def write_status(self, phase: str, **progress: float | None) -> None:
        """Replace ``status.json``, at most every ``STATUS_EVERY_S`` seconds in one phase."""
        now = time.monotonic()
        if self._folder is None or (phase == self._phase and now < self._status_due):
            return
        self._phase = phase
        self._status_due = now + STATUS_EVERY_S
        with self._warnings():
            self._events.flush()
        with self._warnings():
            replace_json(self._folder / STATUS, {"phase": phase, **progress})

    def enter(self, phase: str, **more: float) -> None:
        """Write ``status.json`` with another phase and more, and the rest as it is."""
        self.write_status(**{**self.read_status(), **more, "phase": phase})

    def write_error(self, error: BaseException | None) -> None:
        """Record the error with which the group ends, once; None: there is none."""
        # A reference to the error would keep its frames, and all tensors in them.
        if error is None or "_is_in_events" in vars(error):
            return
        vars(error)["_is_in_events"] = True
        kind = type(error).__name__
        self.append(ERROR, {"type": kind, "error": f"{kind}: {error}"})

    def write_rejection(self, error: ValueError) -> None:
        """Record that the group ends because of its input, and would do so again."""
        vars(error)["_is_in_events"] = True
        self.append(REJECTION, {"type": type(error).__name__, "error": str(error)})
        self.enter(REJECTED)

    @fence("the result of this group")
    def write_end(self, result: Mapping[str, Any]) -> None:
        """Append the end of the group with its result. The last such event counts."""
        if self._folder is not None:
            self._events.append({"time": time.time(), "event": END, **result})
            self._events.flush(survives_power_cut=True)

    @contextlib.contextmanager
    def _warnings(self, *fatal: type[OSError]) -> Iterator[None]:
        """A context in which an error of the disk is a warning, except of the kinds named."""
        try:
            yield
        except fatal:
            raise
        except OSError as error:
            now = time.monotonic()
            if now < self._warning_due:
                return
            self._warning_due = now + WARN_EVERY_S
            log.warning(
                "Cannot use %s (%s). Training continues; %d lines wait in memory until there is "
                "space, and %d older ones are lost",
                self._folder,
                error,
                self._events.num_waiting,
                self._events.num_lost,
            )
