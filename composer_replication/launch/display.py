"""Shows a run while it goes on: a live table on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleRenderable
from rich.console import Group as Lines
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from composer_replication.diloco.fence import fence
from composer_replication.group.words import format_duration, plural
from composer_replication.launch.group import Group
from composer_replication.launch.live_run import LiveRun

TABLE_EVERY_S = 0.3
LOOK_EVERY_S = 1.0
"""How often the groups are looked at where there is no table, in seconds."""
LINE_EVERY_S = 30.0
"""Least time between two lines about the run, in seconds. In between there is an outer step."""

OTHER_LINES = 5
"""Lines of a terminal that the rows leave free: the heading, what is below them, the cursor's."""

STYLES = {"good": "", "waiting": "yellow", "bad": "bold red"}


class Display:
    """Shows the groups: a table on a terminal, else a line an outer step, and what happens.

    Without a terminal there is at most one line in ``LINE_EVERY_S`` seconds. While the context is
    open a thread of its own reads what the groups write.

    Args:
        console: Where the display is written.
        run: The run. No other thread may read with this object.
    """

    def __init__(self, console: Console, run: LiveRun) -> None:
        self._console = console
        # Without auto_refresh rich starts no thread of its own, so that the table does not flicker
        # and nothing is drawn after the end. Warnings on the terminal are written above the table.
        to_stderr = sys.stderr.isatty()
        live = _LiveTable(Text(""), console=console, auto_refresh=False, redirect_stderr=to_stderr)
        self._live = live if console.is_terminal else None
        self._run = run
        self._line_at, self._line_step = time.monotonic() - LINE_EVERY_S, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep_refreshing, daemon=True)

    def __enter__(self) -> Display:
        with fence("the table of the groups"):
            if self._live:
                self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self.refresh(is_last=True)
        with fence("the end of the table"):
            if self._live:
                self._live.stop()

    def _keep_refreshing(self) -> None:
        while not self._over.wait(TABLE_EVERY_S if self._live else LOOK_EVERY_S):
            self.refresh()

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
    def refresh(self, *, is_last: bool = False) -> None:
        """Show the groups, and what has happened since the last time.

        Args:
            is_last: Whether the run is over.
        """
        for line in self._run.update():
            self.say(line)
        now, step = time.monotonic(), self._run.outer_steps
        if self._live:
            self._live.update(live_table(self._run, self._console.height), refresh=True)
        elif is_last or (step > self._line_step and now >= self._line_at + LINE_EVERY_S):
            self._line_at, self._line_step = now, step
            self.say(self._run.status_line)


class _LiveTable(Live):
    """A live display of which nothing stays when the terminal is made narrower.

    The terminal then wraps the lines that are too long, and rich erases as many as it has drawn.
    """

    _widths: Sequence[int] = ()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erase the rows that the terminal has added, before all that is printed."""
        width = self.console.width
        added = sum(max(0, each - 1) // width for each in self._widths)
        lines = self.console.render_lines(self.renderable, pad=False)
        self._widths = [*map(Segment.get_line_length, lines)]
        rows = [(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * added
        return [Control(*rows), *super().process_renderables(renderables)]


def live_table(run: LiveRun, height: int) -> Lines:
    """Return what a terminal shows of the groups: a row a group, and a line about all.

    Args:
        run: The run.
        height: Of the terminal, in lines. If there are more groups, those with a problem are shown.
    """
    groups = run.groups.values()
    by_mood = sorted(groups, key=lambda group: group.mood == "good")
    chosen = set(by_mood[: max(1, height - OTHER_LINES)])
    shown = [group for group in groups if group in chosen]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=16)
    table.add_column("", min_width=4, max_width=40)
    for name in ("step", "groups", "loss", "time left"):
        table.add_column(name, no_wrap=True, justify="right", min_width=6)
    for group in shown:
        table.add_row(*_row(group))
    left_out = len(groups) - len(shown)
    style = STYLES["bad" if run.differ else "good"]
    below = [(f"and {plural(left_out, 'other group')}", "")] if left_out else []
    lines = [
        Text(text, style=style, no_wrap=True, overflow="ellipsis")
        for text, style in (*below, (run.overview, style))
    ]
    return Lines(table, *lines)


def _row(group: Group) -> Iterator[Text | ProgressBar]:
    yield Text(group.name, style=STYLES[group.mood])
    yield Text(group.state, style=STYLES[group.mood])
    yield Text("") if group.done is None else ProgressBar(1.0, group.done, complete_style="cyan")
    yield Text(group.step)
    participants = group.newest.get("diloco/num_participants")
    yield Text("-" if participants is None else f"{participants:.0f}")
    loss, left = group.status.get("loss"), group.seconds_left
    yield Text("-" if loss is None else f"{loss:.3f}")
    yield Text("-" if left is None else format_duration(left))
