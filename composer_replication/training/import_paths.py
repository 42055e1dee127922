"""Finds the module of an import path without importing it, and what the path names by importing."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from composer_replication.training.key_checks import ConfigError


def import_target(path: str) -> Any:
    """Import whatever has this path: a module, something in it, or a member of a class in it.

    Raises:
        ConfigError: There is no such name, or importing its module fails.
    """
    names = path.split(".")
    try:
        found: Any = importlib.import_module(names[0])
        for count, name in enumerate(names[1:], 2):
            if isinstance(found, ModuleType) and not hasattr(found, name):
                _import_submodule(found, ".".join(names[:count]))
            elif not hasattr(found, name):
                raise no_such_name(".".join(names[:count]), dir(found))
            found = getattr(found, name)
    except ConfigError:
        raise
    except Exception as error:  # whatever a module of the user's own raises
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _import_submodule(package: ModuleType, path: str) -> None:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        locations = list(getattr(package, "__path__", ()))
        raise no_such_name(path, [*dir(package), *modules_in(locations)]) from None


def find_module(path: str) -> tuple[ModuleSpec, list[str]]:
    """Find the module that a path begins with, and the names that are left after it.

    Raises:
        ConfigError: There is no module of the first name.
    """
    names = path.split(".")
    spec = find_spec(names[0])  # which imports nothing, unlike one with dots
    if spec is None:
        known = {*sys.stdlib_module_names, *modules_in(None)}
        close = difflib.get_close_matches(names[0], known, n=1)
        hint = f"did you mean {close[0]!r}? Else install" if close else "install"
        raise ConfigError(
            f"there is no module {names[0]!r} for {path}: {hint} it in the environment of every "
            "group, or start the command in the folder that it lies in"
        )
    for count in range(1, len(names)):
        locations = spec.submodule_search_locations
        path_so_far = ".".join(names[: count + 1])
        found = PathFinder.find_spec(path_so_far, locations) if locations is not None else None
        if found is None:
            return spec, names[count:]
        spec = found
    return spec, []


def modules_in(locations: Iterable[str] | None) -> list[str]:
    """The modules in these folders; None: all that do not lie in a package."""
    return [module.name for module in pkgutil.iter_modules(locations)]


def no_such_name(path: str, known: Iterable[str]) -> ConfigError:
    """The error of a path whose last name does not exist, with the closest one that does."""
    module, _, name = path.rpartition(".")
    public = {each for each in known if not each.startswith("_")}
    close = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
    hint = f"did you mean {module}.{close[0]}?" if close else "look it up in its documentation"
    return ConfigError(f"{module} has no {name!r}: {hint}")
