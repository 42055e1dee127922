"""Notices what happens to the replica groups of a run, from what the groups write."""

from __future__ import annotations

import time
from collections.abc import Sequence

from composer_replication.callback.words import format_duration, format_roughly, listed_groups
from composer_replication.launch.group_view import GroupView
from composer_replication.launch.overview import compared, newest_outer_step, participants
from composer_replication.launch.supervision import LEFT_OUT, RESTARTING

SAY_SILENT_AFTER_S = 120.0
"""A group in training that completes no step for so long is worth a line."""


class GroupNews:
    """Says once of each event what has happened: a return, another number of groups, a silence."""

    def __init__(self) -> None:
        self._away_since: dict[str, float] = {}
        self._silent: set[str] = set()
        self._num_participants: int | None = None
        self._do_differ = False

    def of(self, groups: Sequence[GroupView]) -> list[str]:
        """Return a line for each event since the last call.

        Args:
            groups: All groups of the run.
        """
        lines = [*self._returns(groups), *self._other_participants(groups)]
        return [*lines, *self._silences(groups), *self._difference(groups)]

    def _returns(self, groups: Sequence[GroupView]) -> list[str]:
        now = time.monotonic()
        for group in groups:
            if group.phase == RESTARTING:
                self._away_since.setdefault(group.name, now)
            elif group.phase == LEFT_OUT:
                self._away_since.pop(group.name, None)
        back = [g for g in groups if g.name in self._away_since and g.phase == "training"]
        return [
            f"group {group.name} is back after "
            f"{format_duration(now - self._away_since.pop(group.name))}, "
            f"at outer step {group.outer_step}"
            for group in back
        ]

    def _other_participants(self, groups: Sequence[GroupView]) -> list[str]:
        before, self._num_participants = self._num_participants, participants(groups)
        if before in (None, self._num_participants):
            return []
        step, now = newest_outer_step(groups), self._num_participants
        return [f"outer step {step}: {now} of {len(groups)} groups took part, {before} before"]

    def _silences(self, groups: Sequence[GroupView]) -> list[str]:
        silent = {group.name: group for group in groups if group.silent_s > SAY_SILENT_AFTER_S}
        new = [name for name in silent if name not in self._silent]
        self._silent = set(silent)
        if not new:
            return []
        duration = format_roughly(silent[new[0]].silent_s)
        have = "has" if len(new) == 1 else "have"
        return [f"{listed_groups(new)} {have} completed no step for {duration}"]

    def _difference(self, groups: Sequence[GroupView]) -> list[str]:
        comparison = compared(groups)
        differed, self._do_differ = (
            self._do_differ,
            comparison is not None and comparison.digest is None,
        )
        if differed or comparison is None or comparison.digest is not None:
            return []
        return [f"the groups' parameters are DIFFERENT at outer step {comparison.outer_step}"]
