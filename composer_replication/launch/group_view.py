"""What the display knows about one replica group, from the files that the group writes."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Literal

from composer_replication.callback.run_folder import EVENTS, OUTER_STEP, REJECTED, STATUS, SYNC
from composer_replication.callback.words import format_duration, format_roughly
from composer_replication.launch.run_record import implied_sync_every
from composer_replication.launch.supervision import LEFT_OUT, NOT_BACK, RESTARTING
from composer_replication.replica.json_files import JsonLineReader, read_json

MAX_DIGESTS = 1000
"""Digests of a group that are kept, for comparison with those of slower groups."""

SILENT_AFTER_S = 10.0
"""A training group that has completed no step for so long is shown as silent. A group whose steps
take long has five steps' time."""

_ENDED_BADLY = (LEFT_OUT, NOT_BACK, REJECTED)

Mood = Literal["good", "waiting", "bad"]


class GroupView:
    """What the display shows of one replica group, from its ``status.json`` and ``events.jsonl``.

    Args:
        folder: The group's folder, ``replica_<id>``.

    Attributes:
        name: The group's id.
        status: The newest ``status.json``.
        sync: The newest sync of ``events.jsonl``; empty before the first sync.
        digests: Digest of the global parameters by outer step, of the newest ``MAX_DIGESTS`` steps.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = folder.name.removeprefix("replica_")
        self._metrics = JsonLineReader(folder / EVENTS)
        self.status: dict[str, Any] = {}
        self.sync: dict[str, Any] = {}
        self.digests: dict[int, str] = {}

    def update(self, exit_status: int | None) -> None:
        """Read what the group has written since the last call.

        Args:
            exit_status: The group's exit status, which becomes its phase; None while it runs.

        Raises:
            OSError: A file cannot be read.
        """
        self.status = read_json(self._folder / STATUS) or self.status
        if exit_status == 0:
            self.status["phase"] = "finished"
        elif exit_status is not None and self.phase not in _ENDED_BADLY:
            self.status["phase"] = "failed"
        for line in self._metrics.read():
            if line.get("event") != SYNC:
                continue
            self.sync = line
            if line.get("diloco/global_digest"):
                self.digests.pop(line[OUTER_STEP], None)  # repeated after a resume
                self.digests[line[OUTER_STEP]] = line["diloco/global_digest"]
                if len(self.digests) > MAX_DIGESTS:
                    del self.digests[next(iter(self.digests))]

    @property
    def phase(self) -> str:
        """What the group does now, in the words of ``status.json``."""
        return self.status.get("phase", "starting")

    @property
    def silent_s(self) -> float:
        """Seconds since the last completed step of a group in training; 0 if that is not long."""
        trained_at = self.status.get("trained_at")
        if self.phase != "training" or trained_at is None:
            return 0.0
        silent_s = time.time() - trained_at
        return silent_s if silent_s > max(SILENT_AFTER_S, 5 * self._step_s) else 0.0

    @property
    def _step_s(self) -> float:
        """Mean seconds of a batch, as far as the group's own estimate of its end implies it."""
        left = (self.status.get("max_batches") or 0) - self.status.get("batch", 0)
        return (self.status.get("seconds_left") or 0.0) / left if left > 0 else 0.0

    @property
    def state(self) -> str:
        """What the group does now, or what is wrong with it, in at most 20 characters."""
        if self.phase == RESTARTING:
            pause_s = self.status.get("restart_at", 0.0) - time.time()
            return f"restarts in {pause_s:.0f} s" if pause_s >= 0.5 else "starting again"
        return f"no step for {format_roughly(self.silent_s)}" if self.silent_s else self.phase

    @property
    def mood(self) -> Mood:
        """Whether the group trains, is awaited, or has failed."""
        if self.phase in ("failed", *_ENDED_BADLY):
            return "bad"
        return "waiting" if self.phase == RESTARTING or self.silent_s else "good"

    @property
    def outer_step(self) -> int:
        """The newest outer step that the group has taken or taken over."""
        return int(max(self.status.get("outer_step") or 0, self.sync.get(OUTER_STEP, 0)))

    @property
    def participants(self) -> int | None:
        """Groups in the newest sync of this group; None before any."""
        number = self.sync.get("diloco/num_participants")
        return None if number is None else int(number)

    @property
    def rounds(self) -> int | None:
        """Number of rounds that the group trains for; None if it is not known."""
        batches, sync_every = self.status.get("max_batches"), implied_sync_every(self.status)
        return math.ceil(batches / sync_every) if batches and sync_every else None

    @property
    def round(self) -> str:
        """The group's round, and the number of rounds if it is known."""
        if "round" not in self.status:
            return "-"
        sync_every = implied_sync_every(self.status)
        if not self.rounds or not sync_every:
            return f"{int(self.status['round'])}"
        # A group that has joined later has its own count of steps, and the others' of batches.
        return f"{int(self.status['batch'] / sync_every)} / {self.rounds}"

    @property
    def done(self) -> float | None:
        """The part of its batches that the group has trained, 0 to 1; None if it is not known."""
        batches = self.status.get("max_batches")
        return min(1.0, self.status.get("batch", 0) / batches) if batches else None

    @property
    def loss(self) -> float | None:
        """The newest training loss; None before the first batch."""
        return self.status.get("loss")

    @property
    def sync_s(self) -> float | None:
        """Seconds for which the newest sync blocked training; None before any."""
        return self.sync.get("diloco/sync_seconds")

    @property
    def compute_fraction(self) -> float | None:
        """Part of the time since the sync before the newest that the group trained, 0 to 1."""
        return self.sync.get("diloco/compute_fraction")

    @property
    def time_left(self) -> str:
        """The time until the group has trained all batches; "-" if it is not known or on hold."""
        seconds = self.status.get("seconds_left")
        if seconds is None or self.phase != "training" or self.silent_s:
            return "-"
        return format_duration(seconds)
