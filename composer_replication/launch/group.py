"""What a replica group has recorded in its folder, read as that grows."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from composer_replication.group import run_folder
from composer_replication.group.run_folder import EVENTS, OUTER_STEP, REJECTED, STATUS, SYNC
from composer_replication.group.words import (
    FRUITLESS_SYNCS,
    format_roughly,
    plural,
    why_nothing_was_learned,
)
from composer_replication.util.curve import Curve
from composer_replication.util.json_files import JsonLineReader, read_json, replace_json

MAX_DIGESTS = 1000
"""Digests of a group that are kept, for comparison with those of slower groups."""

MAX_EVENTS = 100
"""The most events on the page of a run, and so of a group: the newest ones."""

COSINES = 20
"""Syncs over which the cosines of the outer loop are averaged."""

SILENT_AFTER_S = 10.0
"""A training group that has completed no step for so long is shown as silent. A group whose steps
take long has five steps' time."""

RESTARTING, LEFT_OUT, NOT_BACK = "restarting", "left out", "not back"
"""Phases of a group that has died: it will be started again; it failed too often, and the others go
on; it died when no group was left to join."""

FINISHED, FAILED = "finished", "failed"
"""Phases of a group that has ended for good by itself, and of one with which the run ends."""

TRAINING = ("training", "warm-up")
JOINED = (*TRAINING, "evaluating", FINISHED)
"""Phases of a group that trains, and of one that has joined the others."""

_ENDED_BADLY = (FAILED, LEFT_OUT, NOT_BACK, REJECTED)


class Trouble(NamedTuple):
    """What was unusual about a sync.

    Attributes:
        time: When it was over.
        text: What has happened; empty if nothing was unusual.
        steps_lost: How many inner steps the group has thrown away.
        why_lost: Why it has thrown them away; empty if it has not.
    """

    time: float
    text: str
    steps_lost: int
    why_lost: str

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Trouble:
        """Find what was unusual about the sync of an event in ``events.jsonl``."""
        retries, lost = int(line.get("diloco/retries", 0)), int(line.get("diloco/steps_lost", 0))
        is_finite = math.isfinite(line.get("diloco/pseudo_gradient_norm", 0.0))
        healed = "loaded the state of the others" if line.get("diloco/healed") else ""
        unsound = f"pseudo-gradient {'left out' if is_finite else 'not finite'}" if lost else ""
        why = healed or unsound
        parts = [
            why,
            f"{plural(retries, 'retry', 'retries')} of the sync" if retries else "",
            f"{plural(lost, 'inner step')} thrown away" if lost else "",
        ]
        text = ", ".join(filter(None, parts))
        step = int(line.get(OUTER_STEP, 0))
        return cls(line.get("time", 0.0), text and f"outer step {step}: {text}", lost, why)


class Group:
    """A replica group, as its ``events.jsonl`` and ``status.json`` show it.

    Iterating reads its committed syncs from the file, since millions do not fit into memory.

    Args:
        folder: The group's folder, ``replica_<id>``.

    Attributes:
        name: The group's id.
        began: When this object was made.
        status: The newest ``status.json``.
        others: Its events other than syncs, by kind.
        result: Its final result; empty if it has none.
        newest: Its newest sync; empty before the first.
        digests: Digest of the global parameters by outer step, of the newest ``MAX_DIGESTS`` steps.
        losses: Rows of batch and loss at evenly spaced syncs.
        troubles: Syncs that were unusual.
        cosines: Of the newest syncs, those of the mean with the momentum and between groups.
        bytes_sent: What all its ranks have sent in syncs.
        inner_steps: Its inner steps until its newest sync.
        steps_lost: Those of its inner steps that were thrown away.
        fruitless: The number of its last syncs to which no group has contributed.
        contributed_at: When the newest sync to which it has contributed was over.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name.removeprefix("replica_")
        self._folder = folder
        self._reader = JsonLineReader(folder / EVENTS)
        self.began = time.time()  # a continued run has earlier events
        self._length = self.inner_steps = self.bytes_sent = self.steps_lost = self.fruitless = 0
        self._position = self._inner_s = self._all_s = self.contributed_at = 0.0
        self._fragment_bytes: dict[int, int] = {}
        self.status: dict[str, Any] = {}
        self.others: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.result: dict[str, Any] = {}
        self.newest: dict[str, Any] = {}
        self.digests: dict[int, str] = {}
        self.troubles: deque[Trouble] = deque(maxlen=MAX_EVENTS)
        self.losses = Curve()
        self.cosines: deque[tuple[float, float]] = deque(maxlen=COSINES)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        lines = JsonLineReader(self._folder / EVENTS).read()
        return (line for line in lines if line.get("event") == SYNC)

    def __len__(self) -> int:
        return self._length

    # ---- what has happened ------------------------------------------------------------------

    def read(self) -> None:
        """Read what the group has written since the last call.

        Raises:
            OSError: A file cannot be read.
        """
        for line in self._reader.read():
            self._add(line)
        self.status = read_json(self._folder / STATUS) or self.status

    def enter(self, phase: str, **more: float) -> None:
        """Write another phase into ``status.json``, for a group that has ended.

        Raises:
            OSError: It cannot be written.
        """
        self.status = self.status | {"phase": phase, **more}
        replace_json(self._folder / STATUS, self.status)

    def _add(self, line: dict[str, Any]) -> None:
        kind, at = line.get("event", ""), line.get("time", 0.0)
        if kind in (run_folder.START, run_folder.CONTINUED):
            self.result = {}
        elif kind == run_folder.END:
            self.result = {k: v for k, v in line.items() if k not in ("time", "event")}
        if kind == run_folder.CONTINUED:
            self._position = 0.0
        if kind == SYNC:
            self._add_sync(line, at)
        else:
            self.others[kind].append(line)
        if kind in (run_folder.START, SYNC):
            since = max(0.0, at - self._position) if self._position else 0.0  # clocks are set back
            self._all_s, self._position = self._all_s + since, at
            other_s = line.get("diloco/sync_seconds", 0.0) if kind == SYNC else since
            self._inner_s += max(0.0, since - other_s)

    def _add_sync(self, line: dict[str, Any], at: float) -> None:
        self.newest, step = line, int(line.get(OUTER_STEP, 0))
        self._length += 1
        ranks = line.get("ranks", 1)  # each sends a share of equal size
        self.bytes_sent += ranks * line.get("diloco/bytes_sent", 0)
        of_fragment = ranks * line.get("diloco/bytes_float32", 0)
        self._fragment_bytes[line.get("diloco/fragment", 0)] = of_fragment
        self.inner_steps = max(self.inner_steps, line.get("inner_steps", 0))
        if "batch" in line and line.get("loss") is not None:  # the host of a plain loop has none
            self.losses.add(step, [line["batch"], line["loss"]])
        if digest := line.get("diloco/global_digest"):
            self.digests.pop(step, None)  # repeated after a resume
            self.digests[step] = digest
            if len(self.digests) > MAX_DIGESTS:
                del self.digests[next(iter(self.digests))]
        if "diloco/momentum_cosine" in line and "diloco/group_cosine" in line:
            self.cosines.append((line["diloco/momentum_cosine"], line["diloco/group_cosine"]))
        if line.get("diloco/contribution", 1.0):
            self.contributed_at = at
        self.fruitless = 0 if line.get("diloco/total_contribution", 1.0) else self.fruitless + 1
        trouble = Trouble.of(line)
        self.steps_lost += trouble.steps_lost
        if trouble.text:
            self.troubles.append(trouble)

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The errors with which it ended, and the rejections."""
        errors = self.others[run_folder.ERROR] + self.others[run_folder.REJECTION]
        return sorted(errors, key=lambda error: error.get("time", 0.0))

    def last_error(self, since: float) -> dict[str, Any]:
        """The newest of these since a time, in seconds since 1970; empty without one."""
        return next((e for e in reversed(self.errors) if e.get("time", 0.0) >= since), {})

    @property
    def joined_at(self) -> float:
        """When it joined last; 0 if it never has."""
        return max((start["time"] for start in self.others[run_folder.START]), default=0.0)

    @property
    def failure(self) -> str:
        """Why the run is no success, as this group has seen it; empty if it is one, or goes on."""
        if not self.result and self.fruitless < FRUITLESS_SYNCS:
            return ""
        inner_steps = max(self.inner_steps, self.result.get("inner_steps", 0))
        return why_nothing_was_learned(self.outer_step, inner_steps, self.fruitless)

    @property
    def continued_at(self) -> float:
        """When the run was last continued; 0 if it never was."""
        return max((event["time"] for event in self.others[run_folder.CONTINUED]), default=0.0)

    @property
    def warnings(self) -> list[str]:
        """The warnings about the group's settings and samples, since this object was made."""
        warnings = self.others[run_folder.WARNING]
        return [event["warning"] for event in warnings if event["time"] >= self.began]

    @property
    def num_starts(self) -> int:
        """Processes in which it has joined, since the run was begun or continued."""
        since = self.continued_at
        starts = (start for start in self.others[run_folder.START] if start["time"] >= since)
        return len({start.get("started") for start in starts})

    @property
    def num_damaged(self) -> int:
        """Lines that cannot be read. They are left out."""
        return self._reader.num_damaged

    @property
    def inner_share(self) -> float | None:
        """The share of time in inner steps, from the group's first start to its last sync.

        The time in which the run was stopped is left out. None: the group has made no sync.
        """
        return self._inner_s / self._all_s if self._all_s else None

    @property
    def data_parallel_bytes(self) -> int:
        """What data parallel would send in as many inner steps: every fragment once in each."""
        return self.inner_steps * sum(self._fragment_bytes.values())

    # ---- its present state -------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """What the group does now, in the words of ``status.json``."""
        return self.status.get("phase", "starting")

    @property
    def has_joined(self) -> bool:
        """Whether its callback has written its status: the launcher's own has no steps."""
        return "inner_steps" in self.status

    @property
    def silent_s(self) -> float:
        """Seconds since the last completed step of a group in training; 0 if that is not long."""
        trained_at = self.status.get("trained_at")
        if self.phase not in TRAINING or trained_at is None:
            return 0.0
        left = (self.status.get("max_batches") or 0) - self.status.get("batch", 0)
        step_s = (self.status.get("seconds_left") or 0.0) / left if left > 0 else 0.0
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
        at_end = self.result.get("outer_steps", 0)
        return int(max(self.status.get("outer_step") or 0, self.newest.get(OUTER_STEP, 0), at_end))

    @property
    def step(self) -> str:
        """The batches that the group has trained, and their number if it is known."""
        if "batch" not in self.status:
            return "-"
        of = self.status.get("max_batches")
        return f"{self.status['batch']} / {of}" if of else f"{self.status['batch']}"

    @property
    def done(self) -> float | None:
        """The part of its batches that the group has trained, 0 to 1; None if it is not known."""
        batches = self.status.get("max_batches")
        return min(1.0, self.status.get("batch", 0) / batches) if batches else None

    @property
    def seconds_left(self) -> float | None:
        """The time until the group has trained all batches; None if not known or on hold."""
        is_training = self.phase in TRAINING and not self.silent_s
        return self.status.get("seconds_left") if is_training else None
