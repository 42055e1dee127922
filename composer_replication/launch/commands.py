"""Makes commands of functions and dataclasses, and has the options that several share.

An option is an argument: its help is its line under ``Args:``. This module imports nothing that
takes long.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from composer_replication.arguments import descriptions
from composer_replication.coordinator import HEARTBEAT_TIMEOUT_S

Config = Annotated[Path, typer.Argument()]
OptionalConfig = Annotated[Path | None, typer.Argument()]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value")]
Set = Annotated[list[str] | None, typer.Option(metavar="key=value")]
Count = Annotated[int, typer.Option(min=1)]
OptionalCount = Annotated[int | None, typer.Option(min=1)]


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Make a function, or a dataclass that acts when it is made, a command.

    Args:
        app: The application that gets the command.
        name: The command's name. None: the function's name.
        **settings: As for ``typer.Typer.command``.
    """

    def add(target: Any) -> Any:
        signature, hints = inspect.signature(target), get_type_hints(target, include_extras=True)
        helps = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", descriptions(target), re.M))
        parameters = [
            each.replace(annotation=_option(each.name, hints[each.name], helps.get(each.name)))
            for each in signature.parameters.values()
        ]
        target.__signature__ = signature.replace(parameters=parameters)
        text = inspect.cleandoc(target.__doc__).partition("\n\nArgs:")[0]
        return app.command(name, help=text, **settings)(target)

    return add


def _option(name: str, hint: Any, text: str | None) -> Any:
    if text is None:  # typer.Context
        return hint
    kind, *given = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    # Without a name typer would add a --no-... to a flag.
    names = [f"--{name.replace('_', '-')}"] if kind is bool else []
    info = copy(given[0]) if given else typer.Option(*names)
    info.help = " ".join(text.replace("``", "").split())
    return Annotated[kind, info]


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
    """What ``launch`` runs: a config, or the command after ``--``.

    Args:
        config: A YAML file.
        overrides: Values to replace, such as max_duration=100ba callbacks.diloco.sync_every=50.
        settings: A YAML file with the run's settings, for a command: callbacks.diloco is read.
        set: A setting in place of the file's, such as sync_every=50; can be repeated.
        run_dir: The run's folder, of a command. Default: that of the settings, else a new one.
        resume: Continue the run in --run-dir; the command loads its state.
        nproc: Number of processes in each group. Default: 1, or as many as a command starts.
    """

    context: typer.Context
    config: OptionalConfig = None
    overrides: Overrides = None
    settings: Path | None = None
    set: Set = None
    run_dir: Path | None = None
    resume: bool = False
    nproc: OptionalCount = None


@dataclass(kw_only=True)
class CoordinatorOptions:
    """The options of the ``coordinator`` command: where it listens, and for which groups.

    Args:
        file: A YAML file: a config of ours or of llm-foundry, of which callbacks.diloco is read, or
            one with settings alone. Default: the settings' defaults.
        set: A setting in place of the file's, such as sync_every=50; can be repeated.
        bind: Address of the service. The lighthouse uses the next port.
        state_dir: Folder of the run's state.
        new_settings: Serve other settings than before from the state folder. All groups have to be
            stopped, and resume with the new ones.
        token_file: File with the run's secret, or with two while it is being replaced. Default: the
            environment's secret, else one is generated in the state folder.
        no_token: Use no token: everybody who reaches the service can change the run.
        replicas: Number of groups that a cold start waits for.
        hostname: Name of this machine for the groups. Default: its host name.
        heartbeat_timeout_s: A group counts as dead after this silence, in seconds.
        ssl_certfile: Certificate (PEM) with which to serve HTTPS.
        ssl_keyfile: Private key of the certificate.
    """

    file: Annotated[Path | None, typer.Argument()] = None
    set: Set = None
    bind: Annotated[str, typer.Option(metavar="ADDR:PORT")] = "[::]:29512"
    state_dir: Path = Path("coordinator")
    new_settings: bool = False
    token_file: Path | None = None
    no_token: bool = False
    replicas: OptionalCount = None
    hostname: str | None = None
    heartbeat_timeout_s: Annotated[float, typer.Option(min=0.1)] = HEARTBEAT_TIMEOUT_S
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
