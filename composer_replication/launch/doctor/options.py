"""The options of ``doctor``, as typer takes them. It imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(kw_only=True)
class DoctorOptions:
    """The arguments and options of ``composer-replication doctor``, with the help of each."""

    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="A YAML file with callbacks.diloco, to be checked too.",
            show_default=False,
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value", help="Values to replace.", show_default=False),
    ] = None
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The run's coordinator, http://host:port. Default: that of the config or the "
            "environment.",
        ),
    ] = None
    hostname: Annotated[
        str | None,
        typer.Option(help="Name under which the others reach this machine. Default: as in a run."),
    ] = None
    params: Annotated[
        float | None,
        typer.Option(help="Trainable parameters, e.g. 7e9, to check time and memory.", min=1),
    ] = None
    step_time: Annotated[
        float | None,
        typer.Option(help="Seconds of an inner step, to check time and timeouts.", min=1e-6),
    ] = None
    replicas: Annotated[
        int | None, typer.Option(help="Number of replica groups. Default: the run's.", min=1)
    ] = None
    nproc: Annotated[
        int, typer.Option(help="Number of processes in a group, on this machine.", min=1)
    ] = 1
    json_out: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, for a program.")
    ] = False
