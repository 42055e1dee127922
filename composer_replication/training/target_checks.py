"""Checks what a config names, and its arguments, before anything is imported that takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from inspect import Parameter, Signature
from typing import Any

from composer_replication.training.components import (
    GIVEN,
    TARGET,
    Component,
    components_of,
    nested_in,
)
from composer_replication.training.key_checks import ConfigError, check_keys

HYDRA_KEYS = ("_args_", "_convert_", "_partial_", "_recursive_")
"""Keys beside ``_target_`` that are no arguments: see the documentation of hydra's instantiate."""

_SHARD = ("replica_rank", "num_replica_groups")


def check_section(section: str, contents: Any) -> None:
    """Check the callables that a section of a config names, and their arguments.

    If there is a ``_target_``, the working directory is put on Python's path.

    Args:
        section: The section, a key of ``SHORT_NAMES``.
        contents: The section's values.

    Raises:
        ConfigError: A callable or an argument does not exist, or one is missing.
        ModuleNotFoundError: There is a ``_target_``, and hydra is not installed.
    """
    for component in components_of(section, contents):
        if component.has_targets:
            _prepare_for_targets()
        _check(component, GIVEN.get(section, {}), section)
        for nested in nested_in(component.arguments, component.where):
            _check(nested, {}, "")


def _prepare_for_targets() -> None:
    if find_spec("hydra") is None:
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")
    # As for `python -m`: the command's own folder would be that of the script composer-replication.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _check(component: Component, given: Mapping[str, str], section: str) -> None:
    path, where = component.path, component.where
    if not isinstance(path, str) or not all(path.split(".")) or "." not in path:
        raise ConfigError(f"{where}.{TARGET}={path!r}: write package.module.callable")
    for key in component.arguments:
        if given.get(key):
            raise ConfigError(f"{where}.{key}: leave it out, {given[key]}")
    wrong: ConfigError | None = None
    try:
        for signature in component.signatures():
            wrong = _find_fault(component, signature, given, section)
            if wrong is None:
                return
    except (ConfigError, ModuleNotFoundError) as error:
        if component.is_short:
            return  # Composer is not here: its extra is named when it is imported
        if isinstance(error, ModuleNotFoundError):
            raise
        raise ConfigError(f"{where}: {error}") from error
    if wrong is not None:
        raise wrong


def _find_fault(
    component: Component, signature: Signature, given: Mapping[str, str], section: str
) -> ConfigError | None:
    try:
        _check_arguments(component, signature, given)
        _check_takes(component, signature, given, section)
    except ConfigError as error:
        return error
    return None


def _check_arguments(component: Component, signature: Signature, given: Mapping[str, str]) -> None:
    arguments, parameters = component.arguments, signature.parameters.values()
    keys = [key for key in arguments if component.is_short or key not in HYDRA_KEYS]
    named = [each for each in parameters if each.kind not in _WITHOUT_NAME]
    if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        allowed = [each.name for each in named if not given.get(each.name)]
        check_keys(keys, allowed, component.where)
    if arguments.get("_partial_"):
        return
    by_position = len(arguments.get("_args_", ()))
    missing = [
        each.name
        for each in named[by_position:]
        if each.default is Parameter.empty and each.name not in {*arguments, *given}
    ]
    if missing:
        raise ConfigError(
            f"{component.where} lacks {', '.join(missing)}: {component.path} needs it"
        )


_WITHOUT_NAME = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _check_takes(
    component: Component, signature: Signature, given: Mapping[str, str], section: str
) -> None:
    """Check that an optimizer takes parameters, and that a loader knows which group it is for."""
    names = signature.parameters.keys()
    if section == "optimizer" and not names & given.keys():
        raise ConfigError(
            f"{component.where}: {component.path} takes none of {', '.join(given)}, so it cannot "
            "be given what to train"
        )
    knows_group = names >= set(_SHARD) or component.path.endswith(".ReplicaDataLoader")
    if section == "train_loader" and not knows_group:
        raise ConfigError(
            f"{component.where}: {component.path} would give every group the same samples, since "
            f"it does not take {' and '.join(_SHARD)}. Let our loader divide the dataset "
            f"(name: dataset, dataset: {{{TARGET}: ...}}), or name a function that takes them"
        )
