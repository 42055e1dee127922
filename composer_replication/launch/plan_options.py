"""Options of the command ``plan``. Imports neither torch nor Composer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.plan import HOST_S_PER_PARAM, PlannedRun, parse_link
from composer_replication.training.config import ConfigError


@dataclass(kw_only=True)
class PlanOptions:
    """The options of ``composer-replication plan``, with the help of each."""

    params: Annotated[float, typer.Option(help="Trainable parameters, e.g. 7e9.")]
    link: Annotated[
        str,
        typer.Option(
            help="The rate at which a group can send to the others, e.g. 1Gbit, 100Mbit or 250MB/s."
        ),
    ]
    step_time: Annotated[
        float, typer.Option(help="Seconds of an inner step, measured in one group alone.")
    ]
    groups: Annotated[int, typer.Option(help="Number of replica groups.")]
    round_trip: Annotated[
        float, typer.Option(help="Seconds of a round trip between two groups.")
    ] = 0.0
    host_s_per_param: Annotated[
        float,
        typer.Option(
            help="Seconds a parameter that a sync takes on the host. Measure it with "
            "benchmarks/sync.py; the default is from 2 CPU cores."
        ),
    ] = HOST_S_PER_PARAM
    ranks: Annotated[
        int, typer.Option(help="Processes in each group that hold the same model, as under DDP.")
    ] = 1
    sync_every: Annotated[int, typer.Option(help="Inner steps in a round (H).")] = (
        DiLoCoSettings.sync_every
    )
    num_fragments: Annotated[
        int, typer.Option(help="Fragments of the streaming run. 1 without a delay is vanilla.")
    ] = 2
    fragment_sync_delay: Annotated[
        int, typer.Option(help="Inner steps that overlap a sync of the streaming run (tau).")
    ] = 5
    utilisation: Annotated[
        float,
        typer.Option(help="The share of the time to train. The table has the shortest round."),
    ] = 0.95
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write the numbers to this file.")
    ] = None

    def planned_run(self) -> PlannedRun:
        """Return the run that the options describe.

        Raises:
            ConfigError: ``params`` is no number of parameters.
            ValueError: Another option is out of range.
        """
        if not math.isfinite(self.params):
            raise ConfigError(f"params={self.params}: write how many there are, e.g. 7e9")
        return PlannedRun(
            params=int(self.params),
            link_bits_per_s=parse_link(self.link),
            step_s=self.step_time,
            groups=self.groups,
            round_trip_s=self.round_trip,
            host_s_per_param=self.host_s_per_param,
            ranks=self.ranks,
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
            fragment_sync_delay=self.fragment_sync_delay,
        )
