"""Trains as ``launch`` does under injected faults, and checks the run: ``make chaos``.

    python -m tests.chaos [OPTIONS] [CONFIG [key=value ...]]
    python -m tests.chaos [OPTIONS] -- COMMAND

It is run from the root of the repository.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import typer

from composer_replication.launch.commands import TakesCommand, command
from composer_replication.launch.job import job_of
from composer_replication.launch.output import quiet_others, report_error

from .driver import ChaosOptions, run_chaos

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command(app, cls=TakesCommand)
@dataclass(kw_only=True)
class ChaosCommand(ChaosOptions):
    """Train as `launch` does while injecting faults, check the run, and report what they cost."""

    def run(self) -> int:
        """Train until all groups have ended, and return the exit status."""
        if self.config is None and not self.command:
            self.config = Path("configs/quickstart.yaml")
        return run_chaos(job_of(self), self)


if __name__ == "__main__":
    quiet_others()
    try:
        app()
    except Exception as error:
        sys.exit(report_error(error))
