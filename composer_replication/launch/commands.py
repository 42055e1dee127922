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

Config = Annotated[Path, typer.Argument()]
OptionalConfig = Annotated[Path | None, typer.Argument()]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value")]
Set = Annotated[list[str] | None, typer.Option(metavar="key=value")]
Count = Annotated[int, typer.Option(min=1)]
CommandLine = Annotated[list[str] | None, typer.Option(hidden=True)]
OptionalCount = Annotated[int | None, typer.Option(min=1)]


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Make a function, or a dataclass of the options with a method ``run``, a command.

    The integer that either returns is the exit status.

    Args:
        app: The application that gets the command.
        name: The command's name. None: the function's name.
        **settings: As for ``typer.Typer.command``.
    """

    def add(target: Any) -> Any:
        signature = inspect.signature(target)
        hints = get_type_hints(target, include_extras=True)
        # A dataclass has its own options and those that it inherits.
        texts = map(inspect.getdoc, reversed(getattr(target, "__mro__", [target])))
        described = "\n".join(filter(None, texts))
        helps = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", described, re.M))
        parameters = [
            each.replace(annotation=_option(name, hints[name], helps.get(name, "")))
            for name, each in signature.parameters.items()
        ]

        def act(**given: Any) -> None:
            done = target(**given)
            status = done.run() if isinstance(target, type) else done
            if isinstance(status, int):
                raise typer.Exit(status)

        act.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore
        text = (inspect.getdoc(target) or "").partition("\n\nArgs:")[0]
        app.command(name or target.__name__, help=text, **settings)(act)
        return target

    return add


def _option(name: str, hint: Any, text: str) -> Any:
    kind, *given = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if given:
        info = copy(given[0])
    elif kind is bool:
        # Without a name typer would add a --no-... to it.
        info = typer.Option(f"--{name.replace('_', '-')}")
    else:
        info = typer.Option()
    info.help = " ".join(text.replace("``", "").split())
    return Annotated[kind, info]


class TakesCommand(TyperCommand):
    """A command of ours that takes a command line of the user's after ``--``, as ``CommandLine``.

    Click itself drops ``--`` and would take what follows for arguments of ours.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if "--" in args:
            first = args.index("--")
            words = args[first + 1 :] or [""]  # no command at all is an error of ``check_command``
            args = [*args[:first], *(f"--command={word}" for word in words)]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


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
        command: The command line after ``--``.
    """

    config: OptionalConfig = None
    overrides: Overrides = None
    settings: Path | None = None
    set: Set = None
    run_dir: Path | None = None
    resume: bool = False
    nproc: OptionalCount = None
    command: CommandLine = None
