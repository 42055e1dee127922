"""Builds what a config names by hydra's ``instantiate``, with objects that YAML cannot hold."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer import Algorithm, Callback, ComposerModel
from composer.loggers import LoggerDestination
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch.optim import Optimizer

from composer_replication.training.components import ConfigError, check_keys, components_of

MAKES: dict[str, tuple[type, str]] = {
    "model": (ComposerModel, "wrap it, as composer.models.HuggingFaceModel does"),
    "optimizer": (Optimizer, "use one of torch's kind"),
    "algorithms": (Algorithm, "derive it from Composer's"),
    "callbacks": (Callback, "derive it from Composer's"),
    "loggers": (LoggerDestination, "derive it from Composer's"),
}
"""What a section's callables have to make, and what to do if they make something else."""

OF_THE_CONFIG = (TypeError, ValueError, LookupError, AttributeError, ImportError)
"""Errors of a bad argument, which would come again at a restart. Faults of a network may pass."""


@dataclass(frozen=True)
class Found:
    """A callable that a config names, with the arguments that the config has for it.

    Attributes:
        section: The section that names it, a key of ``SHORT_NAMES``.
        where: Its place in the config, for messages.
        partial: The callable with its arguments, whose own ``_target_`` have been called.
    """

    section: str
    where: str
    partial: functools.partial[Any]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What the callable takes, by name."""
        try:
            return inspect.signature(self.partial.func).parameters
        except ValueError:  # some functions written in C have no signature
            return inspect.signature(lambda **unknown: None).parameters

    def build(self, **offered: Any) -> Any:
        """Call it.

        Args:
            **offered: Objects that it gets if it names them as arguments.

        Raises:
            ConfigError: It rejects a value, or makes something of another kind.
        """
        parameters, given = self.parameters, self.partial.keywords
        for key in given:
            if key in offered:
                raise ConfigError(f"{self.where}.{key}: leave it out, it follows from the rest")
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            check_keys(given, parameters.keys() - offered.keys(), self.where)
        try:
            built = self.partial(**{key: offered[key] for key in parameters if key in offered})
        except OF_THE_CONFIG as error:
            raise ConfigError(" ".join(f"{self.where}: {error}".split())) from error
        kind, fix = MAKES.get(self.section, (object, ""))
        if not isinstance(built, kind):
            made = type(built).__name__
            raise ConfigError(f"{self.where} makes a {made} and no {kind.__name__}: {fix}")
        return built


def find_all(section: str, contents: Mapping[str, Any] | None) -> list[Found]:
    """Import the callables that a section names.

    Args:
        section: The section, a key of ``SHORT_NAMES``.
        contents: The section's values.

    Raises:
        ConfigError: There is no such callable, or one in its arguments rejects a value.
    """
    components = components_of(section, contents or {})
    return [Found(section, where, _partial(where, each)) for where, each in components.items()]


def build_all(section: str, contents: Mapping[str, Any] | None, **offered: Any) -> list[Any]:
    """Build all components of a section. See ``find_all`` and ``Found.build``."""
    return [found.build(**offered) for found in find_all(section, contents)]


def build_one(section: str, contents: Mapping[str, Any] | None, **offered: Any) -> Any:
    """Build the component of a section that names one; None if it is empty."""
    return next(iter(build_all(section, contents, **offered)), None)


def _partial(where: str, component: Mapping[str, Any]) -> functools.partial[Any]:
    # As for `python -m`: the command's own folder would be that of the script composer-replication.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        # Hydra would copy objects, and make containers of its own of lists: it gets none.
        return instantiate({"_convert_": "all", **component}, _partial_=True)
    except InstantiationException as error:
        raised: BaseException = error
        while isinstance(raised, InstantiationException) and raised.__cause__ is not None:
            error, raised = raised, raised.__cause__
        # Hydra's text has several lines: what, "full_key: ..." and advice of its own.
        what = re.split(r", set env var|:\n|\n", str(error))[0]
        if what.startswith("Error locating"):
            raised = raised.__cause__ or raised  # the user's own module may raise any error
        elif not isinstance(raised, (*OF_THE_CONFIG, InstantiationException)):
            raise raised from None
        key = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)
        place = f"{where}.{key[1]}" if key else where
        said = f"{place}: {what}" if raised is error else f"{place}: {what}: {raised}"
        raise ConfigError(" ".join(said.split())) from raised


@contextlib.contextmanager
def composers_errors_in_the_config(
    is_before_training: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Raise Composer's own ``ValueError`` as a ``ConfigError``: it would come again at a restart.

    Before the first batch Composer parses and compares what the config says, and raises a
    ``ValueError`` for a value that it rejects. During training it may be a fault of the data or of
    the machine.

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
