"""The table that is drawn again and again on a terminal: a row a replica group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from composer_replication.callback.words import plural
from composer_replication.launch.group_view import GroupView
from composer_replication.launch.overview import compared, overview

GAP = 2
"""Spaces between two columns."""

WIDEST_BAR = 60
"""Most characters of a bar."""

OTHER_LINES = 5
"""Lines of a terminal that the rows leave free: the heading, what stands below, the cursor's."""

STYLES = {"good": "", "waiting": "yellow", "bad": "bold red"}


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        name: Its heading.
        width: Its least width, in characters, so that it does not change all the time.
        rank: Columns of low rank are shown first, as long as the terminal has room.
        text: Returns a group's text; None: the column has the bars.
        is_left: Whether its texts begin at its left edge.
    """

    name: str
    width: int
    rank: int
    text: Callable[[GroupView], str] | None
    is_left: bool = False

    def width_for(self, groups: Sequence[GroupView]) -> int:
        """The width that no group's text exceeds."""
        texts = [] if self.text is None else [self.text(group) for group in groups]
        return max(self.width, *(len(text) for text in (self.name, *texts)))


def _number(template: str, value: float | None) -> str:
    return "-" if value is None else template.format(value)


COLUMNS = (
    Column("group", 5, 0, lambda group: group.name, is_left=True),
    Column("state", 16, 1, lambda group: group.state, is_left=True),
    Column("", 8, 6, None, is_left=True),
    Column("done", 4, 7, lambda group: _number("{:.0%}", group.done)),
    Column("round", 7, 3, lambda group: group.round),
    Column("outer step", 10, 8, lambda group: str(group.outer_step)),
    Column("groups", 6, 5, lambda group: _number("{}", group.participants)),
    Column("loss", 6, 2, lambda group: _number("{:.3f}", group.loss)),
    Column("last sync", 9, 9, lambda group: _number("{:.2f} s", group.sync_s)),
    Column("computing", 9, 10, lambda group: _number("{:.0%}", group.compute_fraction)),
    Column("time left", 10, 4, lambda group: group.time_left),
)


def live_table(groups: Sequence[GroupView], width: int, height: int) -> list[Table | Text]:
    """Return what the live display shows of the groups; no line of it is wider than the terminal.

    Args:
        groups: The groups by their ids.
        width: Of the terminal, in characters.
        height: Of the terminal, in lines. If there are more groups, those with a problem are shown.
    """
    shown = _shown(groups, max(1, height - OTHER_LINES))
    widths = _widths(shown, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for column, column_width in widths.items():
        justify = "left" if column.is_left else "right"
        table.add_column(column.name, justify=justify, no_wrap=True, width=column_width)
    for group in shown:
        table.add_row(*(_cell(column, group, widths[column]) for column in widths))
    parts: list[Table | Text] = [table]
    if left_out := len(groups) - len(shown):
        parts.append(_one_line(f"and {plural(left_out, 'other group')}"))
    comparison = compared(groups)
    differ = comparison is not None and comparison.digest is None
    parts.append(_one_line(overview(groups), STYLES["bad" if differ else "good"]))
    return parts


def _shown(groups: Sequence[GroupView], rows: int) -> list[GroupView]:
    """The groups that have a row: those with a problem first, if not all fit."""
    chosen = set(sorted(groups, key=lambda group: group.mood == "good")[:rows])
    return [group for group in groups if group in chosen]


def _widths(groups: Sequence[GroupView], width: int) -> dict[Column, int]:
    """The columns that fit into a terminal, in their order, and the width of each."""
    begun = [group for group in groups if group.status.get("round") is not None]
    has_bars = not begun or any(group.done is not None for group in begun)
    room = width  # rich counts a gap behind the last column too
    widths: dict[Column, int] = {}
    for column in sorted(COLUMNS, key=lambda column: column.rank):
        if column.text is None and not has_bars:
            continue
        needed = column.width_for(groups)
        if room < needed + GAP:
            break
        widths[column] = needed
        room -= needed + GAP
    for column in widths:
        if column.text is None:
            widths[column] = min(widths[column] + room, WIDEST_BAR)
    return {column: widths[column] for column in COLUMNS if column in widths}


def _cell(column: Column, group: GroupView, width: int) -> Text | ProgressBar:
    if column.text is not None:
        return Text(column.text(group), style=STYLES[group.mood] if column.is_left else "")
    if group.done is None:
        return Text("")
    return ProgressBar(1.0, group.done, width, complete_style="cyan", finished_style="green")


def _one_line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
