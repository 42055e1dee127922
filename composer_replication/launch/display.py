"""Shows a run while it goes on: a live table on a terminal, else a line from time to time."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.group_news import GroupNews
from composer_replication.launch.group_view import GroupView
from composer_replication.launch.live_table import live_table
from composer_replication.launch.overview import newest_outer_step, status_line

log = logging.getLogger(__name__)

TABLE_EVERY_S = 0.3
LOOK_EVERY_S = 1.0
"""How often the groups are looked at where there is no table, in seconds."""
LINE_EVERY_S = 30.0
"""Least time between two lines about the run, in seconds. In between there is an outer step."""


class Display:
    """Shows the groups: a table on a terminal, else a line an outer step, and what happens.

    Without a terminal there is at most one line in ``LINE_EVERY_S`` seconds.

    Args:
        console: Where the display is written.
        run_dir: The run's folder.
        replicas: Number of groups.
    """

    def __init__(self, console: Console, run_dir: Path, replicas: int) -> None:
        self._console = console
        self._live = _live_on(console) if console.is_terminal else None
        self._groups = [GroupView(run_dir / f"replica_{i}") for i in range(replicas)]
        self._news = GroupNews()
        self._looked_at = time.monotonic()
        self._line_at = self._looked_at - LINE_EVERY_S
        self._line_step = 0
        self._has_failed = False

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Refresh the display from a thread while the caller's thread is busy."""
        over = threading.Event()

        def keep_refreshing() -> None:
            while not over.wait(TABLE_EVERY_S):
                self.refresh({})

        thread = threading.Thread(target=keep_refreshing, daemon=True)
        with self:
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                self.refresh({}, is_last=True)

    def say(self, text: str) -> None:
        """Write what has happened, with the time of day; on a terminal above the table."""
        self._console.print(
            f"{time.strftime('%H:%M:%S')}  {text}",
            markup=False,
            highlight=False,
            soft_wrap=self._live is None,
        )

    def refresh(self, exit_statuses: Mapping[int, int | None], *, is_last: bool = False) -> None:
        """Show the groups, if the last time was long enough ago.

        Args:
            exit_statuses: Exit status of each group; None or missing while it runs.
            is_last: Whether the run is over. The display is then refreshed in any case.
        """
        every = TABLE_EVERY_S if self._live else LOOK_EVERY_S
        if time.monotonic() < self._looked_at + every and not is_last:
            return
        self._looked_at = time.monotonic()
        try:
            for replica_id, group in enumerate(self._groups):
                group.update(exit_statuses.get(replica_id))
            for line in self._news.of(self._groups):
                self.say(line)
            self._show(is_last)
        except OSError as error:  # a full or broken disk must not end the groups, which go on
            if not self._has_failed:
                log.warning("Cannot show how the groups are doing, training goes on: %s", error)
            self._has_failed = True

    def _show(self, is_last: bool) -> None:
        if self._live:
            parts = live_table(self._groups, self._console.width, self._console.height)
            self._live.update(Group(*parts), refresh=True)
        elif is_last or self._is_line_due():
            self._line_at, self._line_step = self._looked_at, newest_outer_step(self._groups)
            self.say(status_line(self._groups))

    def _is_line_due(self) -> bool:
        has_stepped = newest_outer_step(self._groups) > self._line_step
        return has_stepped and self._looked_at >= self._line_at + LINE_EVERY_S


def print_settings(console: Console, settings: DiLoCoSettings, source: str) -> None:
    """Print a run's settings.

    Args:
        console: Where they are printed.
        settings: The settings.
        source: Where they are from.
    """
    text = f"Settings from {source}: {settings}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _live_on(console: Console) -> Live:
    # Without auto_refresh rich starts no thread of its own, so that the table does not flicker and
    # nothing is drawn after the end. Warnings on the same terminal are written above the table.
    return Live(Text(""), console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
