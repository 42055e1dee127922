"""Shows a run while it goes on: a live table on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_replication.diloco.fence import fence
from composer_replication.group.words import format_duration, plural
from composer_replication.launch.group_view import Groups, GroupView
from composer_replication.settings import DiLoCoSettings

TABLE_EVERY_S = 0.3
LOOK_EVERY_S = 1.0
"""How often the groups are looked at where there is no table, in seconds."""
LINE_EVERY_S = 30.0
"""Least time between two lines about the run, in seconds. In between there is an outer step."""

OTHER_LINES = 5
"""Lines of a terminal that the rows leave free: the heading, what stands below, the cursor's."""

STYLES = {"good": "", "waiting": "yellow", "bad": "bold red"}


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
        # Without auto_refresh rich starts no thread of its own, so that the table does not flicker
        # and nothing is drawn after the end. Warnings on the terminal are written above the table.
        to_stderr = sys.stderr.isatty()
        live = Live(Text(""), console=console, auto_refresh=False, redirect_stderr=to_stderr)
        self._live = live if console.is_terminal else None
        self._groups = Groups(run_dir, replicas)
        self._looked_at = time.monotonic()
        self._line_at = self._looked_at - LINE_EVERY_S
        self._line_step = 0

    def __enter__(self) -> Display:
        with fence("the table of the groups"):
            if self._live:
                self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with fence("the end of the table"):
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

    @fence("what happens to the groups")
    def say(self, text: str) -> None:
        """Write what has happened, with the time of day; on a terminal above the table."""
        self._console.print(
            f"{time.strftime('%H:%M:%S')}  {text}",
            markup=False,
            highlight=False,
            soft_wrap=self._live is None,
        )

    @fence("how the groups are doing")
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
        for line in self._groups.update(exit_statuses):
            self.say(line)
        self._show(is_last)

    def _show(self, is_last: bool) -> None:
        step = self._groups.outer_step
        if self._live:
            self._live.update(live_table(self._groups, self._console.height), refresh=True)
        elif is_last or (
            step > self._line_step and self._looked_at >= self._line_at + LINE_EVERY_S
        ):
            self._line_at, self._line_step = self._looked_at, step
            self.say(self._groups.status_line)


def live_table(groups: Groups, height: int) -> Group:
    """Return what a terminal shows of the groups: a row a group, and a line about all.

    Args:
        groups: The groups.
        height: Of the terminal, in lines. If there are more groups, those with a problem are shown.
    """
    by_mood = sorted(groups.views, key=lambda view: view.mood == "good")
    chosen = set(by_mood[: max(1, height - OTHER_LINES)])
    shown = [view for view in groups.views if view in chosen]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=16)
    table.add_column("", min_width=4, max_width=40)
    for name in ("round", "groups", "loss", "time left"):
        table.add_column(name, no_wrap=True, justify="right", min_width=6)
    for view in shown:
        table.add_row(*_row(view))
    left_out = len(groups.views) - len(shown)
    style = STYLES["bad" if groups.differ else "good"]
    below = [(f"and {plural(left_out, 'other group')}", "")] if left_out else []
    lines = [
        Text(text, style=style, no_wrap=True, overflow="ellipsis")
        for text, style in (*below, (groups.overview, style))
    ]
    return Group(table, *lines)


def _row(view: GroupView) -> Iterator[Text | ProgressBar]:
    yield Text(view.name, style=STYLES[view.mood])
    yield Text(view.state, style=STYLES[view.mood])
    yield Text("") if view.done is None else ProgressBar(1.0, view.done, complete_style="cyan")
    yield Text(view.round)
    yield Text("-" if view.participants is None else f"{view.participants}")
    loss, left = view.status.get("loss"), view.seconds_left
    yield Text("-" if loss is None else f"{loss:.3f}")
    yield Text("-" if left is None else format_duration(left))


def print_settings(console: Console, settings: DiLoCoSettings, source: str) -> None:
    """Print a run's settings.

    Args:
        console: Where they are printed.
        settings: The settings.
        source: Where they are from.
    """
    text = f"Settings from {source}: {settings}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
