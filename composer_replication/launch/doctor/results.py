"""The result of a check, and how results are printed and written as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

from composer_replication import __version__


class State(StrEnum):
    """How a check ended. ``SKIPPED``: something is not given that it needs."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    SKIPPED = "skipped"


_FIX = re.compile(
    r"[:.] (?=(?:use|write|give|set|add|leave|make|install|start|run|did you mean|see|correct)\b)",
    re.I,
)
"""What stands between value and fix in an error of this package: the fix begins with a verb."""

_STYLE = {
    State.OK: "green",
    State.WARNING: "yellow",
    State.FAILURE: "bold red",
    State.SKIPPED: "dim",
}


@dataclass(frozen=True)
class Result:
    """What a check has found.

    Args:
        name: What was checked, in a word or two.
        state: How the check ended.
        value: What was found.
        fix: What to do about it, or what to give so that it can be checked; empty if it is well.
    """

    name: str
    state: State
    value: str
    fix: str = ""

    @property
    def line(self) -> Text:
        """The state, the name, and the value with its fix, coloured, without line breaks."""
        end = f". Fix: {self.fix}" if self.fix else ""
        if self.state is State.SKIPPED:
            end = f": {self.fix}"
        one_line = " ".join(f"{self.value}{end}".split())
        return Text.assemble(
            (f"{self.state:<8}", _STYLE[self.state]), f" {self.name:<22} ", one_line
        )


def ok(name: str, value: str) -> Result:
    """Return the result of a check that has found nothing wrong.

    Args:
        name: What was checked.
        value: What was found.
    """
    return Result(name, State.OK, value)


def warning(name: str, value: str, fix: str) -> Result:
    """Return the result of a check that has found something costly, or that may fail later."""
    return Result(name, State.WARNING, value, fix)


def failure(name: str, value: str, fix: str) -> Result:
    """Return the result of a check that has found something with which a run fails."""
    return Result(name, State.FAILURE, value, fix)


def skipped(name: str, needs: str) -> Result:
    """Return the result of a check that was not made.

    Args:
        name: What would have been checked.
        needs: What has to be given so that it can be.
    """
    return Result(name, State.SKIPPED, "not checked", needs)


def from_error(name: str, error: Exception) -> Result:
    """A failure from an error of this package, whose message has the value and then the fix."""
    parts = _FIX.split(str(error), maxsplit=1)
    return failure(name, parts[0], parts[1] if len(parts) > 1 else "correct it")


def has_failed(results: Sequence[Result]) -> bool:
    """Whether there is a failure among the results."""
    return any(result.state is State.FAILURE for result in results)


def print_results(results: Sequence[Result], console: Console) -> None:
    """Print a line for each result, and a last one that counts them."""
    for result in results:
        console.print(result.line, soft_wrap=True)
    counts = {state: sum(result.state is state for result in results) for state in State}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count))


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return what ``doctor --json`` prints: our version, whether all is well, and each result."""
    return {
        "version": __version__,
        "ok": not has_failed(results),
        "results": [asdict(result) for result in results],
    }
