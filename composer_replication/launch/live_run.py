"""A run while it goes on: what is new, and how it does in one line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from composer_replication.group.run_folder import OUTER_STEP
from composer_replication.group.words import (
    format_duration,
    format_roughly,
    listed_groups,
    plural,
)
from composer_replication.launch.group import RESTARTING, TRAINING, Group
from composer_replication.launch.run_record import Run

SAY_SILENT_AFTER_S = 120.0
"""After so many seconds without a completed step of a group in training, a line says so."""


class LiveRun(Run):
    """A run that goes on. Arguments as for ``Run``."""

    def __init__(self, run_dir: Path, ids: Iterable[int | str]) -> None:
        super().__init__(run_dir, ids)
        self._away_since: dict[str, float] = {}
        self._silent: set[str] = set()
        self._warnings: set[str] = set()
        self._participants: int | None = None
        self._differed = False

    def update(self) -> list[str]:
        """Read what the groups have written.

        Returns:
            A line for each event since the last call: a warning, a return, another number of groups
            in a sync, a long silence, different parameters.

        Raises:
            OSError: A file cannot be read.
        """
        for group in self.groups.values():
            group.read()
        return list(self._news())

    def _news(self) -> Iterator[str]:
        warnings = dict.fromkeys(text for group in self.groups.values() for text in group.warnings)
        yield from (text for text in warnings if text not in self._warnings)
        self._warnings.update(warnings)
        now = time.monotonic()
        for name, group in self.groups.items():
            if group.phase == RESTARTING:
                self._away_since.setdefault(name, now)
            elif group.phase in TRAINING and name in self._away_since:
                away = format_duration(now - self._away_since.pop(name))
                yield f"group {name} is back after {away}, at outer step {group.outer_step}"
        before, self._participants = self._participants, self.participants
        if before not in (None, self._participants):
            part = f"{self._participants} of {len(self.groups)} groups took part, {before} before"
            yield f"outer step {self.outer_steps}: {part}"
        silent = [g.name for g in self.groups.values() if g.silent_s > SAY_SILENT_AFTER_S]
        new, self._silent = [name for name in silent if name not in self._silent], set(silent)
        if new:
            yield f"{listed_groups(new)}: no step for {format_roughly(SAY_SILENT_AFTER_S)}"
        differed, self._differed = self._differed, self.differ
        if self._differed and not differed:
            yield f"the groups' {self._agreement}"

    @property
    def participants(self) -> int | None:
        """Groups in the newest sync, as those that were in it report; None before any."""
        syncs = [group.newest for group in self.groups.values() if group.newest]
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
        groups = plural(len(self.groups), "group")
        return f"outer step {self.outer_steps}: {self.participants} of {groups}"

    @property
    def differ(self) -> bool:
        """Whether the parameters of the groups that have not died differ."""
        return "DIFFER" in self._agreement

    @property
    def status_line(self) -> str:
        """The state of the whole run, in one line."""
        groups = self.groups.values()
        step = max(groups, key=lambda group: group.status.get("batch") or 0).step
        newest = [group.status.get("loss") for group in self._present]
        losses = sorted(loss for loss in newest if loss is not None)
        texts = dict.fromkeys(f"{loss:.3f}" for loss in losses[:1] + losses[-1:])
        left = [group.seconds_left for group in groups if group.seconds_left is not None]
        in_trouble: dict[str, list[str]] = {}
        for group in groups:
            if group.mood != "good":
                in_trouble.setdefault(group.state, []).append(group.name)
        parts = [
            self._newest,
            "" if step == "-" else f"step {step}",
            f"loss {' to '.join(texts)}" if texts else "",
            f"{format_duration(max(left))} left" if left else "",
            self._agreement,
            *(f"group {', '.join(names)} {state}" for state, names in in_trouble.items()),
        ]
        return ", ".join(filter(None, parts)) or "starting"

    @property
    def _present(self) -> list[Group]:
        """The groups whose newest values are not those of a process that has died."""
        groups = self.groups.values()
        return [group for group in groups if group.mood != "bad" and group.phase != RESTARTING]

    @property
    def _agreement(self) -> str:
        """The comparison of digests at the newest outer step for which several groups have one."""
        found = self.agreement(self._present)
        if found is None:
            return ""
        step, digests = found["outer_step"], {*found["digests"].values()}
        if len(digests) > 1:
            return f"parameters DIFFER at step {step}"
        at = "" if step == self.outer_steps else f" at step {step}"
        return f"parameters equal{at}: {digests.pop()[:8]}"
