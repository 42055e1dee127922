"""What is known about the replica groups of a run while it goes on, and what is said about them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from composer_replication.group.run_folder import OUTER_STEP, REJECTED, STATUS, WARNING
from composer_replication.group.words import (
    format_duration,
    format_roughly,
    listed_groups,
    plural,
)
from composer_replication.launch.group_events import GroupEvents
from composer_replication.launch.supervision import LEFT_OUT, NOT_BACK, RESTARTING
from composer_replication.replica.json_files import read_json

SILENT_AFTER_S = 10.0
"""A training group that has completed no step for so long is shown as silent. A group whose steps
take long has five steps' time."""

SAY_SILENT_AFTER_S = 120.0
"""A group in training that completes no step for so long is worth a line."""

_ENDED_BADLY = ("failed", LEFT_OUT, NOT_BACK, REJECTED)


class GroupView:
    """What is shown of one replica group, from its ``status.json`` and ``events.jsonl``.

    Args:
        folder: The group's folder, ``replica_<id>``.

    Attributes:
        name: The group's id.
        events: What it has recorded.
        status: The newest ``status.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._status_path = folder / STATUS
        self._began = time.time()  # a run that is continued has events before it
        self.events = GroupEvents(folder)
        self.name = self.events.name
        self.status: dict[str, Any] = {}

    def update(self, exit_status: int | None) -> None:
        """Read what the group has written since the last call.

        Args:
            exit_status: The group's exit status, which becomes its phase; None while it runs.

        Raises:
            OSError: A file cannot be read.
        """
        self.status = read_json(self._status_path) or self.status
        if exit_status == 0:
            self.status["phase"] = "finished"
        elif exit_status is not None and self.phase not in _ENDED_BADLY:
            self.status["phase"] = "failed"
        self.events.read()

    @property
    def warnings(self) -> list[str]:
        """Of the group's settings and samples."""
        warnings = self.events.others[WARNING]
        return [event["warning"] for event in warnings if event["time"] >= self._began]

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
        """Whether the group trains, is awaited, or has failed."""
        if self.phase in _ENDED_BADLY:
            return "bad"
        return "waiting" if self.phase == RESTARTING or self.silent_s else "good"

    @property
    def outer_step(self) -> int:
        """The newest outer step that the group has taken or taken over."""
        return int(max(self.status.get("outer_step") or 0, self.events.newest.get(OUTER_STEP, 0)))

    @property
    def participants(self) -> int | None:
        """Groups in the newest sync of this group; None before any."""
        number = self.events.newest.get("diloco/num_participants")
        return None if number is None else int(number)

    @property
    def round(self) -> str:
        """The group's round, and the number of rounds if it is known."""
        if "round" not in self.status:
            return "-"
        batches, sync_every = self.status.get("max_batches"), self.status.get("sync_every")
        if not batches or not sync_every:
            return f"{int(self.status['round'])}"
        # A group that has joined later has its own count of steps, and the others' of batches.
        return f"{int(self.status['batch'] / sync_every)} / {math.ceil(batches / sync_every)}"

    @property
    def done(self) -> float | None:
        """The part of its batches that the group has trained, 0 to 1; None if it is not known."""
        batches = self.status.get("max_batches")
        return min(1.0, self.status.get("batch", 0) / batches) if batches else None

    @property
    def seconds_left(self) -> float | None:
        """The time until the group has trained all batches; None if not known or on hold."""
        is_training = self.phase == "training" and not self.silent_s
        return self.status.get("seconds_left") if is_training else None


class Groups:
    """All replica groups of a run.

    Args:
        run_dir: The run's folder.
        replicas: Number of groups.

    Attributes:
        views: The groups by their ids.
    """

    def __init__(self, run_dir: Path, replicas: int) -> None:
        self.views = [GroupView(run_dir / f"replica_{i}") for i in range(replicas)]
        self._away_since: dict[str, float] = {}
        self._silent: set[str] = set()
        self._warnings: set[str] = set()
        self._participants: int | None = None
        self._differed = False

    def update(self, exit_statuses: Mapping[int, int | None]) -> list[str]:
        """Read what the groups have written.

        Args:
            exit_statuses: As for ``Display.refresh``.

        Returns:
            A line for each event since the last call: a warning, a return, another number of groups
            in a sync, a long silence, different parameters.

        Raises:
            OSError: A file cannot be read.
        """
        for replica_id, view in enumerate(self.views):
            view.update(exit_statuses.get(replica_id))
        return list(self._news())

    def _news(self) -> Iterator[str]:
        warnings = dict.fromkeys(text for view in self.views for text in view.warnings)
        yield from (text for text in warnings if text not in self._warnings)
        self._warnings.update(warnings)
        now = time.monotonic()
        for view in self.views:
            if view.phase == RESTARTING:
                self._away_since.setdefault(view.name, now)
            elif view.phase == "training" and view.name in self._away_since:
                away = format_duration(now - self._away_since.pop(view.name))
                yield f"group {view.name} is back after {away}, at outer step {view.outer_step}"
        before, self._participants = self._participants, self.participants
        if before not in (None, self._participants):
            part = f"{self._participants} of {len(self.views)} groups took part, {before} before"
            yield f"outer step {self.outer_step}: {part}"
        silent = [view.name for view in self.views if view.silent_s > SAY_SILENT_AFTER_S]
        new, self._silent = [name for name in silent if name not in self._silent], set(silent)
        if new:
            yield f"{listed_groups(new)}: no step for {format_roughly(SAY_SILENT_AFTER_S)}"
        differed, self._differed = self._differed, self.differ
        if self._differed and not differed:
            yield f"the groups' {self._agreement}"

    @property
    def outer_step(self) -> int:
        """The newest outer step of any group; 0 before the first."""
        return max(view.outer_step for view in self.views)

    @property
    def participants(self) -> int | None:
        """Groups in the newest sync, as those that were in it report; None before any."""
        syncs = [view.events.newest for view in self.views if view.participants is not None]
        newest = max((sync[OUTER_STEP] for sync in syncs), default=0)
        numbers = [s["diloco/num_participants"] for s in syncs if s[OUTER_STEP] == newest]
        return int(min(numbers)) if numbers else None

    @property
    def overview(self) -> str:
        """Which outer step was taken by how many groups, and whether their parameters are equal."""
        return ", ".join(filter(None, (self._newest, self._agreement)))

    @property
    def _newest(self) -> str:
        if self.participants is None:
            return ""
        groups = plural(len(self.views), "group")
        return f"outer step {self.outer_step}: {self.participants} of {groups}"

    @property
    def differ(self) -> bool:
        """Whether the parameters of the groups that have not died differ."""
        return "DIFFER" in self._agreement

    @property
    def status_line(self) -> str:
        """How the whole run does, in one line."""
        rounds = max(self.views, key=lambda view: view.status.get("batch") or 0).round
        newest = [view.status.get("loss") for view in self._present]
        losses = sorted(loss for loss in newest if loss is not None)
        texts = dict.fromkeys(f"{loss:.3f}" for loss in losses[:1] + losses[-1:])
        left = [view.seconds_left for view in self.views if view.seconds_left is not None]
        in_trouble: dict[str, list[str]] = {}
        for view in self.views:
            if view.mood != "good":
                in_trouble.setdefault(view.state, []).append(view.name)
        parts = [
            self._newest,
            "" if rounds == "-" else f"round {rounds}",
            f"loss {' to '.join(texts)}" if texts else "",
            f"{format_duration(max(left))} left" if left else "",
            self._agreement,
            *(f"group {', '.join(names)} {state}" for state, names in in_trouble.items()),
        ]
        return ", ".join(filter(None, parts)) or "starting"

    @property
    def _present(self) -> list[GroupView]:
        """The groups whose newest values are not those of a process that has died."""
        return [view for view in self.views if view.mood != "bad" and view.phase != RESTARTING]

    @property
    def _agreement(self) -> str:
        """The comparison of digests at the newest outer step that all groups have one of."""
        present = self._present
        common = (
            set.intersection(*(set(view.events.digests) for view in present)) if present else set()
        )
        if not common or len(present) < 2:
            return ""
        step = max(common)
        digests = {view.events.digests[step] for view in present}
        if len(digests) > 1:
            return f"parameters DIFFER at step {step}"
        at = "" if step == self.outer_step else f" at step {step}"
        return f"parameters equal{at}: {digests.pop()[:8]}"
