"""A replica group of a run: what is in its folder, read as that grows, and how it is now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from composer_replication.group.history import History
from composer_replication.group.run_folder import EVENTS, REJECTED, STATUS, SYNC
from composer_replication.group.words import format_roughly
from composer_replication.util.json_files import JsonLineReader, read_json

SILENT_AFTER_S = 10.0
"""A training group that has completed no step for so long is shown as silent. A group whose steps
take long has five steps' time."""

RESTARTING, LEFT_OUT, NOT_BACK = "restarting", "left out", "not back"
"""Phases of a group that has died: it will be started again; it failed too often, and the others go
on; it died when no group was left to join."""

FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
"""Phases of a group that has ended for good by itself, of one with which the run ends, and of one
that would have been started again by then."""

TRAINING = ("training", "warm-up")
JOINED = (*TRAINING, "evaluating", FINISHED)
"""Phases of a group that trains, and of one that has joined the others."""

_ENDED_BADLY = (FAILED, LEFT_OUT, NOT_BACK, REJECTED)


class Group(History):
    """A replica group, as its ``events.jsonl`` and ``status.json`` show it.

    Iterating reads its committed syncs from the file, since millions do not fit into memory.

    Args:
        folder: The group's folder, ``replica_<id>``.

    Attributes:
        name: The group's id.
        status: The newest ``status.json``.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.name = folder.name.removeprefix("replica_")
        self.status: dict[str, Any] = {}
        self._folder = folder
        self._reader = JsonLineReader(folder / EVENTS)
        self._num_odd = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lines = JsonLineReader(self._folder / EVENTS).read()
        return (line for line in lines if line.get("event") == SYNC)

    def read(self) -> None:
        """Read what the group has written since the last call.

        Raises:
            OSError: A file cannot be read.
        """
        for line in self._reader.read():
            try:
                self.add(line)
            except (AttributeError, LookupError, TypeError, ValueError):
                # It costs this group a line, and not the page that shows all groups.
                self._num_odd += 1
        self.status = read_json(self._folder / STATUS) or self.status

    @property
    def num_damaged(self) -> int:
        """Lines that cannot be read. They are left out."""
        return self._reader.num_damaged + self._num_odd

    # ---- its present state -------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the group does now, in the words of ``status.json``."""
        return self.status.get("phase", "starting")

    @property
    def has_joined(self) -> bool:
        """Whether its callback has written its status since the launch.

        Before, the launcher's own says so, with the steps that an earlier process had reached.
        """
        return self.phase != "starting" and "trained_at" in self.status

    @property
    def silent_s(self) -> float:
        """Seconds since the last completed step of a group in training; 0 if that is not long."""
        trained_at = self.status.get("trained_at")
        if self.phase not in TRAINING or trained_at is None:
            return 0.0
        left = max(1, (self.status.get("max_batches") or 0) - self.batch)
        step_s = (self.status.get("seconds_left") or 0.0) / left
        silent_s = time.time() - trained_at
        return silent_s if silent_s > max(SILENT_AFTER_S, 5 * step_s) else 0.0

    @property
    def state(self) -> str:
        """What the group does now, or what is wrong with it, in at most 20 characters."""
        if self.phase == RESTARTING:
            pause_s = self.status.get("restart_at", 0.0) - time.time()
            return f"restarts in {pause_s:.0f} s" if pause_s >= 0.5 else "starting again"
        return f"no step for {format_roughly(self.silent_s)}" if self.silent_s else self.phase

    @property
    def mood(self) -> Literal["good", "waiting", "bad"]:
        """Whether the group trains, is waited for, or has failed."""
        if self.phase in _ENDED_BADLY:
            return "bad"
        return "waiting" if self.phase == RESTARTING or self.silent_s else "good"

    @property
    def outer_step(self) -> int:
        """The newest outer step that the group has taken or taken over."""
        return max(self.status.get("outer_step") or 0, super().outer_step)

    @property
    def batch(self) -> int:
        """The batches that the group has trained."""
        return self.status.get("batch") or 0

    @property
    def loss(self) -> float | None:
        """The loss of its last batch; None before it has one."""
        return self.status.get("loss")

    @property
    def step(self) -> str:
        """The batches that the group has trained, and their number if known; empty before any."""
        if "batch" not in self.status:
            return ""
        batches = self.status.get("max_batches")
        return f"{self.batch} / {batches}" if batches else f"{self.batch}"

    @property
    def done(self) -> float | None:
        """The part of its batches that the group has trained, 0 to 1; None if it is not known."""
        batches = self.status.get("max_batches")
        return min(1.0, self.batch / batches) if batches else None

    @property
    def seconds_left(self) -> float | None:
        """The time until the group has trained all batches; None if not known or on hold."""
        is_training = self.phase in TRAINING and not self.silent_s
        return self.status.get("seconds_left") if is_training else None
