"""Names that are imported when they are asked for, and the extras that bring what they need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

EXTRA_OF = {
    "composer": "composer",
    "fastapi": "coordinator",
    "pydantic": "coordinator",
    "starlette": "coordinator",
    "uvicorn": "coordinator",
    "httpx": "launch",
    "hydra": "launch",
    "lightning": "lightning",
    "omegaconf": "launch",
    "packaging": "launch",
    "pytorch_lightning": "lightning",
    "rich": "launch",
    "tenacity": "launch",
    "transformers": "transformers",
    "typer": "launch",
    "yaml": "launch",
}
"""The modules that this package can do without, and which extra of it brings each."""


class MissingExtraError(ModuleNotFoundError):
    """A module is missing that an extra of this package brings; the message has the line to run."""


def named_extra(who: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error that names the extra, if one brings the missing module; else the error as it is.

    Args:
        who: What needs the module.
        error: Python's.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRA_OF:
        return error
    needed = "Composer" if module == "composer" else module
    line = f"run pip install '.[{EXTRA_OF[module]}]' in a clone of this package"
    return MissingExtraError(f"{who} needs {needed}: {line}", name=module)


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: a public name is imported when it is asked for.

    torch takes a second to import and Composer several, and the command rejects a bad config before
    that. Without an extra, the names that do not need it are there.

    Args:
        package: Its ``__name__``.
        modules: The module of each public name.
    """

    def __getattr__(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            raise named_extra(name, error) from None

    return __getattr__
