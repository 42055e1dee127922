"""Calls what a config names, with the config's arguments and the objects that YAML cannot hold."""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer import Algorithm, Callback, ComposerModel
from composer.loggers import LoggerDestination
from torch.optim import Optimizer

from composer_replication.training.components import (
    TARGET,
    Component,
    component_of,
    components_of,
    nested_in,
)
from composer_replication.training.import_paths import import_target
from composer_replication.training.key_checks import ConfigError

log = logging.getLogger(__name__)

MAKES: dict[str, tuple[type, str]] = {
    "model": (ComposerModel, "wrap it, as composer.models.HuggingFaceModel does"),
    "optimizer": (Optimizer, "use one of torch's kind"),
    "algorithms": (Algorithm, "derive it from Composer's"),
    "callbacks": (Callback, "derive it from Composer's"),
    "loggers": (LoggerDestination, "derive it from Composer's"),
}
"""What a section's callables have to make, and what to do if they make something else."""


def build_all(section: str, contents: Mapping[str, Any] | None, **offered: Any) -> list[Any]:
    """Build all components of a section.

    Args:
        section: The section, a key of ``SHORT_NAMES``.
        contents: The section's values.
        **offered: Objects that each callable gets if it names them as arguments.

    Raises:
        ConfigError: A callable rejects a value, or makes something of another kind.
    """
    components = components_of(section, contents or {})
    return [_build(section, component, offered) for component in components]


def build_one(section: str, contents: Mapping[str, Any] | None, **offered: Any) -> Any:
    """Build the component of a section that names one; None if it is empty."""
    return next(iter(build_all(section, contents, **offered)), None)


def build(section: str, name: str, contents: Mapping[str, Any] | None, **offered: Any) -> Any:
    """Build one component by its name. See ``build_all``."""
    return _build(section, component_of(section, name, contents or {}), offered)


def takes(component: Component) -> frozenset[str]:
    """The names of the arguments that a component's callable has."""
    try:
        return frozenset(inspect.signature(import_target(component.path)).parameters)
    except ValueError:  # some of C's tell nothing
        return frozenset()


def _build(section: str, component: Component, offered: Mapping[str, Any]) -> Any:
    try:
        names = takes(component)
        objects = {name: each for name, each in offered.items() if name in names}
        if component.has_targets:
            built = _instantiate(component, objects)
        else:
            built = import_target(component.path)(**component.arguments, **objects)
    except (TypeError, ValueError) as error:
        if component.has_targets:
            raised = error.__cause__ or error
            log.error("%s: %s raised this", component.where, component.path, exc_info=raised)
        where = f"{section}: {component.name}" if component.is_short else component.where
        raise ConfigError(f"{where}: {error}") from error
    kind, fix = MAKES.get(section, (object, ""))
    if not isinstance(built, kind):
        raise ConfigError(
            f"{component.where}: {component.path} makes a {type(built).__name__} and no "
            f"{kind.__name__}: {fix}"
        )
    return built


def _instantiate(component: Component, objects: Mapping[str, Any]) -> Any:
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    for nested in nested_in(component.arguments, component.where):
        import_target(nested.path)  # hydra's own error would not say why it fails
    contents = {"_convert_": "all", TARGET: component.path, **component.arguments}
    try:
        # Hydra would copy objects, and make containers of its own of lists: it gets none.
        return instantiate(contents, _partial_=True)(**objects)
    except InstantiationException as error:
        inner, cause = error, error.__cause__
        while isinstance(cause, InstantiationException):
            inner, cause = cause, cause.__cause__
        if cause is None or isinstance(cause, TypeError | ValueError):
            # In hydra's words, which have the name and the place of what is wrong.
            raise ConfigError(" ".join(str(inner).split())) from cause
        raise cause from None


@contextlib.contextmanager
def composers_errors_in_the_config(
    is_before_training: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Raise Composer's own ``ValueError`` as a ``ConfigError``: it would come again at a restart.

    Before the first batch Composer parses and compares what the config says, and raises a
    ``ValueError`` for a value that it rejects. In the midst of training it may be a fault of the
    data or of the machine.

    Args:
        is_before_training: Whether no batch has been trained on yet.

    Raises:
        ConfigError: Composer has raised a ``ValueError`` before training.
    """
    try:
        yield
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_composers = frame.f_globals["__name__"].partition(".")[0] == "composer"
        if not is_composers or not is_before_training():
            raise
        raise ConfigError(f"Composer rejects the config: {error}") from error
