"""The settings of a run as a table of plain text, for logs and terminals."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict
from typing import Any

from composer_replication.diloco.settings import DiLoCoSettings

GAP = "   "
"""Spaces between two columns of settings."""


def settings_table(settings: DiLoCoSettings, width: int = 100) -> list[str]:
    """Lay out all settings in columns of names and values.

    Args:
        settings: The settings.
        width: Most characters of a line. Only a single word that is longer exceeds it.

    Returns:
        The lines: the settings in the order of ``DiLoCoSettings``, down the columns; below them
        those whose values are lists.
    """
    values = asdict(settings)
    long = {name: value for name, value in values.items() if isinstance(value, (list, tuple))}
    short = {name: _text(value) for name, value in values.items() if name not in long}
    layouts = (_in_columns(short, number) for number in range(len(short), 1, -1))
    fitting = (lines for lines in layouts if max(map(len, lines)) <= width)
    lines = next(fitting, _in_columns(short, 1))
    for name, value in long.items():
        lines += textwrap.wrap(
            f"{name}  {_text(value)}", width, subsequent_indent="  ", break_long_words=False
        )
    return lines


def _in_columns(values: dict[str, str], num_columns: int) -> list[str]:
    num_rows = math.ceil(len(values) / num_columns)
    items = list(values.items())
    columns = [items[start : start + num_rows] for start in range(0, len(items), num_rows)]
    lines = [""] * num_rows
    for column in columns:
        names, texts = (max(len(item[i]) for item in column) for i in (0, 1))
        for row, (name, text) in enumerate(column):
            lines[row] += f"{name:<{names}}  {text:<{texts}}{GAP}"
    return [line.rstrip() for line in lines]


def _text(value: Any) -> str:
    """A value as in YAML, where that is short."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
