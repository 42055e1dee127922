"""The options of the commands, as typer takes them. It imports nothing heavy.

Annotations are evaluated here: typer would look for their names in the module of a subclass.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

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
Nproc = Annotated[
    int | None,
    typer.Option(
        help="Number of processes in each group. Default: 1, or as many as a command starts.",
        min=1,
        show_default=False,
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(help="Most restarts in a row of a group that dies.", min=0)
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


Set = Annotated[
    list[str] | None,
    typer.Option(
        metavar="key=value",
        help="A setting in place of the file's, such as sync_every=50; can be repeated.",
        show_default=False,
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        help="The run's folder, of a command. Default: that of the settings, else a new one; of "
        "run: COMPOSER_REPLICATION_RUN_DIR, else a temporary one.",
    ),
]


class TakesCommand(TyperCommand):
    """A command of ours that takes a command line of the user's after ``--``.

    Click itself drops ``--`` and would take what follows for arguments of ours.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if "--" in args:
            first = args.index("--")
            args, ctx.meta[_COMMAND] = args[:first], args[first + 1 :]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


_COMMAND = f"{__name__}.command"


def command_after_dashes(context: typer.Context) -> list[str] | None:
    """Return the user's command line; None if there is none."""
    return context.meta.get(_COMMAND)


@dataclass(kw_only=True)
class JobOptions:
    """What ``launch`` runs: a config, or the command after ``--``."""

    context: typer.Context
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file.", show_default=False)
    ] = None
    overrides: Overrides = None
    settings: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with the run's settings, for a command: callbacks.diloco is read.",
            show_default=False,
        ),
    ] = None
    set: Set = None
    run_dir: RunDir = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in --run-dir; the command loads its state."
        ),
    ] = False
    nproc: Nproc = None


@dataclass(kw_only=True)
class CoordinatorOptions:
    """The options of the ``coordinator`` command: where it listens, and for which groups."""

    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A YAML file: a config of ours or of llm-foundry, of which callbacks.diloco is "
            "read, or one with settings alone. Default: the settings' defaults.",
            show_default=False,
        ),
    ] = None
    set: Set = None
    bind: Annotated[
        str,
        typer.Option(
            help="Address of the service. The lighthouse uses the next port.", metavar="ADDR:PORT"
        ),
    ] = "[::]:29512"
    state_dir: Annotated[Path, typer.Option(help="Folder of the run's state.")] = Path(
        "coordinator"
    )
    new_settings: Annotated[
        bool,
        typer.Option(
            "--new-settings",
            help="Serve other settings than before from the state folder. All groups have to be "
            "stopped, and resume with the new ones.",
        ),
    ] = False
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
