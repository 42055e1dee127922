"""Notices groups that run and never join, most likely for want of the callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from composer_replication.callback.run_folder import STATUS, log_path
from composer_replication.launch.run_record import plural
from composer_replication.replica.json_files import read_json

LOOK_EVERY_S = 5.0


class StartWatch:
    """Says once, after a while, which groups have not joined, and what is probably wrong.

    A group has joined if its callback has written its status.

    Args:
        run_dir: The run's folder.
        ids: The groups.
        timeout_s: Seconds that they have to join.
        advice: What is probably wrong. Empty: nothing is ever said.
        say: Is given the text.
    """

    def __init__(
        self,
        run_dir: Path,
        ids: Iterable[int | str],
        timeout_s: float,
        advice: str,
        say: Callable[[str], object],
    ) -> None:
        self._run_dir, self._timeout_s, self._advice, self._say = run_dir, timeout_s, advice, say
        self._missing = list(ids) if advice else []
        self._began = time.monotonic()
        self._due = self._began + min(LOOK_EVERY_S, timeout_s)

    def look(self) -> None:
        """Look at the groups that have not joined, from time to time. Call it often."""
        now = time.monotonic()
        if not self._missing or now < self._due:
            return
        self._due = now + LOOK_EVERY_S
        self._missing = [each for each in self._missing if not has_joined(self._run_dir, each)]
        if self._missing and now >= self._began + self._timeout_s:
            groups = ", ".join(map(str, self._missing))
            after = f"after {plural(round(self._timeout_s), 'second')}"
            self._say(f"Replica group {groups} has not joined {after}. {self._advice}")
            self._missing = []


def has_joined(run_dir: Path, replica_id: int | str) -> bool:
    """Whether the callback of a group has written its status: the launcher's own has no steps."""
    status = read_json(log_path(run_dir, replica_id).with_name(STATUS))
    return "inner_steps" in status
