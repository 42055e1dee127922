"""The options of the commands, as typer takes them. It imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key=value",
        help="Values to replace, such as max_duration=100ba callbacks.diloco.sync_every=50.",
        show_default=False,
    ),
]
Replicas = Annotated[int, typer.Option(help="Number of replica groups.", min=1)]
Nproc = Annotated[int, typer.Option(help="Number of processes in each group.", min=1)]
MaxRestarts = Annotated[
    int,
    typer.Option(help="Most restarts in a row of a group that dies.", min=0),
]
StragglerTimeout = Annotated[
    float,
    typer.Option(
        help="Longest wait of a sync for a group that is alive and late, in seconds.", min=0.1
    ),
]
HangTimeout = Annotated[
    float,
    typer.Option(help="A group ends itself after this time without progress, in seconds.", min=1.0),
]


class Weights(StrEnum):
    """Which weights ``export`` writes: the global ones, or EMA's average of them."""

    GLOBAL = "global"
    EMA = "ema"


@dataclass(kw_only=True)
class CoordinatorOptions:
    """The options of the ``coordinator`` command: where it listens, and for which groups."""

    config: Config
    overrides: Overrides = None
    bind: Annotated[
        str,
        typer.Option(
            help="Address of the service. The lighthouse uses the next port.", metavar="ADDR:PORT"
        ),
    ] = "[::]:29512"
    state_dir: Annotated[Path, typer.Option(help="Folder of the run's state.")] = Path(
        "coordinator"
    )
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the run's secret, or with two while it is being replaced. Default: "
            "the environment's secret, else one is generated in the state folder."
        ),
    ] = None
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Use no token: everybody who reaches the service can change the run."
        ),
    ] = False
    replicas: Annotated[
        int | None, typer.Option(help="Number of groups that a cold start waits for.", min=1)
    ] = None
    hostname: Annotated[
        str | None,
        typer.Option(help="Name of this machine for the groups. Default: its host name."),
    ] = None
    tls_dir: Annotated[
        str | None,
        typer.Option(help="Folder of certificates for TLS. Default: the environment's."),
    ] = None
    heartbeat_timeout_s: Annotated[
        float, typer.Option(help="A group counts as dead after this silence, in seconds.", min=0.1)
    ] = HEARTBEAT_TIMEOUT_S
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(help="Certificate (PEM) with which to serve HTTPS.", show_default=False),
    ] = None
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Private key of the certificate.", show_default=False)
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(help="Reject clients without a certificate of this CA.", show_default=False),
    ] = None
