"""Trains as ``launch`` does under injected faults, and checks the run: ``make chaos``.

    python -m tests.chaos [OPTIONS] [CONFIG [key=value ...]]
    python -m tests.chaos [OPTIONS] -- COMMAND

It is run from the root of the repository.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from composer_replication.launch.commands import (
    Count,
    JobOptions,
    TakesCommand,
    command,
)
from composer_replication.launch.job import job_of
from composer_replication.launch.output import quiet_others, report_error
from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S

from .driver import run_chaos
from .injector import KINDS, RECOVERY_S

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command(app, cls=TakesCommand)
@dataclass(kw_only=True)
class ChaosCommand(JobOptions):
    """Train as `launch` does while injecting faults, check the run, and report what they cost.

    Args:
        replicas: Number of replica groups.
        faults_per_minute: Mean number of faults in a minute.
        duration: Length of the training, in seconds.
        seed: Seed of kinds, victims and times of the faults.
        kinds: Kinds of faults, separated by commas.
        slow: A group that is slow all the time, such as 2:0.5; can be repeated.
        straggler_timeout_s: Longest wait of a sync for a group that is alive and late, in seconds.
        recovery_s: Seconds without new faults at the end, for groups to recover.
    """

    replicas: Count = 3
    faults_per_minute: Annotated[float, typer.Option(min=0.1)] = 2.0
    duration: Annotated[float, typer.Option(min=10.0)] = 600.0
    seed: int = 0
    kinds: str = ",".join(KINDS)
    slow: Annotated[list[str] | None, typer.Option(metavar="GROUP:SPEED")] = None
    straggler_timeout_s: Annotated[float, typer.Option(min=0.1)] = STRAGGLER_TIMEOUT_S
    recovery_s: float = RECOVERY_S

    def run(self) -> int:
        """Train until all groups have ended, and return the exit status."""
        if self.config is None and not self.command:
            self.config = Path("configs/quickstart.yaml")
        return run_chaos(
            job_of(self),
            replicas=self.replicas,
            faults_per_minute=self.faults_per_minute,
            duration_s=self.duration,
            seed=self.seed,
            kinds=self.kinds.split(","),
            slow=self.slow or (),
            straggler_timeout_s=self.straggler_timeout_s,
            recovery_s=self.recovery_s,
        )


if __name__ == "__main__":
    quiet_others()
    try:
        app()
    except Exception as error:
        sys.exit(report_error(error))
