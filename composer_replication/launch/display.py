"""Shows a run while it goes on: a live table on a terminal, else a line from time to time.

Both say what is new: who is away or back, who is silent, whose parameters differ.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_replication.group.words import format_duration, format_roughly, listed_groups, plural
from composer_replication.launch.group import RESTARTING, STOPPED, TRAINING, Group
from composer_replication.launch.run_record import Run
from composer_replication.util.curves import agreement_of
from composer_replication.util.fence import fence

TABLE_EVERY_S = 0.3
LOOK_EVERY_S = 1.0
"""How often the groups are looked at where there is no table, in seconds."""
LINE_EVERY_S = 30.0
"""Least time between two lines about the run, in seconds. In between there is an outer step."""

SAY_SILENT_AFTER_S = 120.0
"""After so many seconds without a completed step of a group in training, a line says so."""

OTHER_LINES = 5
"""Lines of a terminal that the rows leave free: the heading, what is below them, the cursor's."""

STYLES = {"good": "", "waiting": "yellow", "bad": "bold red"}


class LiveRun(Run):
    """A run that goes on. Arguments as for ``Run``."""

    def __init__(self, run_dir: Path, ids: Iterable[int | str]) -> None:
        super().__init__(run_dir, ids)
        self._away_since: dict[str, float] = {}
        self._silent: set[str] = set()
        self._warnings: set[str] = set()
        self._steps_lost = Counter[str]()
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
        for group in self:
            group.read()
        return [
            *self._new_warnings(),
            *self._new_losses_of_steps(),
            *self._who_is_back(),
            *self._new_participants(),
            *self._who_is_silent(),
            *self._new_difference(),
        ]

    def _new_warnings(self) -> Iterator[str]:
        for group in self:
            for text in group.warnings:
                if text not in self._warnings:
                    self._warnings.add(text)
                    yield text

    def _new_losses_of_steps(self) -> Iterator[str]:
        thrown_away = defaultdict[str, list[str]](list)
        for group in self:
            lost = group.steps_lost_lately - self._steps_lost[group.name]
            self._steps_lost[group.name] = group.steps_lost_lately
            if lost > 0:
                text = f"{plural(lost, 'inner step')} thrown away, {group.why_lost}"
                thrown_away[text].append(group.name)
        for text, names in thrown_away.items():
            yield f"{listed_groups(names)}: {text}"

    def _who_is_back(self) -> Iterator[str]:
        now = time.monotonic()
        for group in self:
            if group.phase == RESTARTING:
                self._away_since.setdefault(group.name, now)
            elif group.phase in TRAINING and group.name in self._away_since:
                away = format_duration(now - self._away_since.pop(group.name))
                yield f"group {group.name} is back after {away}, at outer step {group.outer_step}"

    def _new_participants(self) -> Iterator[str]:
        before = self._participants
        self._participants = self.participants
        if before not in (None, self._participants):
            part = f"{self._participants} of {len(self.groups)} groups took part, {before} before"
            yield f"outer step {self.outer_steps}: {part}"

    def _who_is_silent(self) -> Iterator[str]:
        before = self._silent
        self._silent = {each.name for each in self if each.silent_s > SAY_SILENT_AFTER_S}
        new = [group.name for group in self if group.name in self._silent - before]
        if new:
            yield f"{listed_groups(new)}: no step for {format_roughly(SAY_SILENT_AFTER_S)}"

    def _new_difference(self) -> Iterator[str]:
        before = self._differed
        self._differed = self.differ
        if self._differed and not before:
            yield f"the groups' {self._agreement}"

    @property
    def participants(self) -> int | None:
        """Groups in the newest sync, as those that were in it report; None before any."""
        newest = max(group.synced_step for group in self)
        numbers = (group.participants for group in self if group.synced_step == newest)
        return min(filter(None, numbers), default=None)

    @property
    def overview(self) -> str:
        """Which outer step was taken by how many groups, and whether their parameters are equal."""
        return self._joined()

    def _joined(self, *progress: str) -> str:
        """The newest sync, how far the groups are in other words, and what came of it."""
        newest = ""
        if self.participants is not None:
            groups = plural(len(self.groups), "group")
            newest = f"outer step {self.outer_steps}: {self.participants} of {groups}"
        learned = "learned nothing" if self.failure else ""
        return ", ".join(filter(None, [newest, *progress, learned, self._agreement]))

    @property
    def differ(self) -> bool:
        """Whether the parameters of the groups that have not died differ."""
        return "DIFFER" in self._agreement

    @property
    def status_line(self) -> str:
        """The state of the whole run, in one line."""
        step = max(self, key=lambda group: group.batch).step
        losses = sorted(group.loss for group in self._present if group.loss is not None)
        texts = dict.fromkeys(f"{loss:.3f}" for loss in losses[:1] + losses[-1:])
        left = [group.seconds_left for group in self if group.seconds_left is not None]
        overview = self._joined(
            f"step {step}" if step else "",
            f"loss {' to '.join(texts)}" if texts else "",
            f"{format_duration(max(left))} left" if left else "",
        )
        in_trouble = defaultdict[str, list[str]](list)
        for group in self:
            if group.mood != "good":
                in_trouble[group.state].append(group.name)
        troubles = (f"group {', '.join(names)} {state}" for state, names in in_trouble.items())
        return ", ".join(filter(None, [overview, *troubles])) or "starting"

    @property
    def _present(self) -> list[Group]:
        """The groups whose newest values are not those of a process that has died."""
        gone = (RESTARTING, STOPPED)
        return [group for group in self if group.mood != "bad" and group.phase not in gone]

    @property
    def _agreement(self) -> str:
        """The comparison of digests at the newest outer step for which several groups have one."""
        found = agreement_of({group.name: group for group in self._present})
        if found is None:
            return ""
        step, digests = found["outer_step"], {*found["digests"].values()}
        if len(digests) > 1:
            return f"parameters DIFFER at step {step}"
        at = "" if step == self.outer_steps else f" at step {step}"
        return f"parameters equal{at}: {digests.pop()[:8]}"


class Display:
    """Shows the groups: a table on a terminal, else a line an outer step, and what happens.

    Without a terminal there is at most one line in ``LINE_EVERY_S`` seconds. While the context is
    open a thread of its own reads what the groups write.

    Args:
        console: Where the display is written, without highlighting.
        run: The run. No other thread may read with this object.
    """

    def __init__(self, console: Console, run: LiveRun) -> None:
        self._console = console
        # Without auto_refresh rich starts no thread of its own, so that the table does not flicker
        # and nothing is drawn after the end. Warnings on the terminal are written above the table.
        to_stderr = sys.stderr.isatty()
        live = Live(console=console, auto_refresh=False, redirect_stderr=to_stderr)
        self._live = live if console.is_terminal else None
        self._run = run
        self._line = ""
        self._line_at = -LINE_EVERY_S
        self._line_step = 0
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
            soft_wrap=self._live is None,
        )

    @fence("how the groups are doing")
    def refresh(self, *, is_last: bool = False) -> None:
        """Show the groups, and what has happened since the last time.

        Args:
            is_last: Whether the run is over. Without a terminal its last line is then written,
                unless it already is.
        """
        for line in self._run.update():
            self.say(line)
        if self._live:
            self._live.update(live_table(self._run, self._console.height), refresh=True)
            return
        now = time.monotonic()
        step = self._run.outer_steps
        line = self._run.status_line
        is_due = step > self._line_step and now >= self._line_at + LINE_EVERY_S
        if (is_due or is_last) and line != self._line:
            self._line = line
            self._line_at = now
            self._line_step = step
            self.say(line)


def live_table(run: LiveRun, height: int) -> Lines:
    """Return what a terminal shows of the groups: a row a group, and a line about all.

    Args:
        run: The run.
        height: Of the terminal, in lines. If there are more groups, those with a problem are shown.
    """
    groups = [*run]
    in_trouble_first = sorted(groups, key=lambda group: group.mood == "good")
    shown = sorted(in_trouble_first[: max(1, height - OTHER_LINES)], key=groups.index)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("group", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=16)
    table.add_column("", min_width=4, max_width=40)
    for name in ("step", "groups", "loss", "time left"):
        table.add_column(name, no_wrap=True, justify="right", min_width=6)
    for group in shown:
        table.add_row(*_row(group))
    style = STYLES["bad" if run.differ or run.failure else "good"]
    overview = Text(run.overview, style=style, no_wrap=True, overflow="ellipsis")
    left_out = len(groups) - len(shown)
    others = [f"and {plural(left_out, 'other group')}"] if left_out else []
    return Lines(table, *others, overview)


def _row(group: Group) -> Iterator[RenderableType]:
    yield Text(group.name, style=STYLES[group.mood])
    yield Text(group.state, style=STYLES[group.mood])
    yield "" if group.done is None else ProgressBar(1.0, group.done, complete_style="cyan")
    yield group.step or "-"
    yield f"{group.participants or '-'}"
    yield "-" if group.loss is None else f"{group.loss:.3f}"
    yield "-" if group.seconds_left is None else format_duration(group.seconds_left)
