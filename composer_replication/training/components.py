"""The callables that a config names: by an import path in ``_target_``, or by a short name.

They are strings, so that a config is checked without importing torch or Composer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions
from composer_replication.training.key_checks import ConfigError, closest
from composer_replication.training.loader_arguments import DatasetArguments, TextArguments
from composer_replication.training.signatures import signatures_of

TARGET = "_target_"

_TEXT = "composer_replication.training.text_data.build_text_loader"
_DATASET = "composer_replication.training.loaders.build_dataset_loader"
_DILOCO = "composer_replication.callback.DiLoCoCallback"

SHORT_NAMES: dict[str, dict[str, str]] = {
    "model": {"byte_gpt": "composer_replication.training.byte_gpt.ByteGPT"},
    "train_loader": {"text": _TEXT, "dataset": _DATASET},
    "eval_loader": {"text": _TEXT, "dataset": _DATASET},
    "optimizer": {
        "decoupled_adamw": "composer.optim.DecoupledAdamW",
        "decoupled_sgdw": "composer.optim.DecoupledSGDW",
        "adamw": "torch.optim.AdamW",
        "sgd": "torch.optim.SGD",
        "muon": "composer_replication.training.muon.Muon",
    },
    "scheduler": {
        "constant_with_warmup": "composer.optim.ConstantWithWarmupScheduler",
        "cosine_with_warmup": "composer.optim.CosineAnnealingWithWarmupScheduler",
        "linear_decay_with_warmup": "composer.optim.LinearWithWarmupScheduler",
    },
    "algorithms": {"gradient_clipping": "composer.algorithms.GradientClipping"},
    "callbacks": {
        "diloco": _DILOCO,
        "lr_monitor": "composer.callbacks.LRMonitor",
        "memory_monitor": "composer.callbacks.MemoryMonitor",
        "optimizer_monitor": "composer.callbacks.OptimizerMonitor",
        "speed_monitor": "composer.callbacks.SpeedMonitor",
    },
    "loggers": {
        "file_logger": "composer.loggers.FileLogger",
        "tensorboard": "composer.loggers.TensorboardLogger",
        "wandb": "composer.loggers.WandBLogger",
    },
}
"""Import paths by section and short name.

``model``, the loaders, ``optimizer`` and ``scheduler`` have theirs in a field ``name``. In
``algorithms``, ``callbacks`` and ``loggers`` every key is a name.
"""

NAMED_BY_FIELD = ("model", "train_loader", "eval_loader", "optimizer", "scheduler")
"""Sections that name one component in a field ``name``, or in ``_target_``."""

ARGUMENTS_OF: dict[str, tuple[type, ...]] = {
    _TEXT: (TextArguments,),
    _DATASET: (DatasetArguments,),
    _DILOCO: (DiLoCoSettings, ReplicaOptions),
}
"""Callables of ours whose arguments are the fields of dataclasses."""

_SHARD = {
    "batch_size": "it follows from global_train_batch_size or device_eval_batch_size",
    "replica_rank": "it is the group's own",
    "num_replica_groups": "it is the run's",
    "split": "",  # "train" or "eval", unless the config has it
}
_PARAMS = ("params", "named_parameters", "model")

GIVEN: dict[str, dict[str, str]] = {
    "train_loader": _SHARD,
    "eval_loader": _SHARD,
    "optimizer": dict.fromkeys(_PARAMS, "it is of the model that the config names"),
    "scheduler": {"optimizer": "it is the one that the config names"},
}
"""Arguments that a section's callable is given if it names them, and why a config may not have one.

Where there is no reason, a config may have it.
"""


@dataclass(frozen=True)
class Component:
    """A callable that a config names, with its arguments.

    Attributes:
        path: Its import path.
        arguments: From the config. They may hold further ``_target_``.
        where: Its section, for messages.
        name: The short name that the config has for it; empty with a ``_target_``.
    """

    path: str
    arguments: Mapping[str, Any]
    where: str
    name: str = ""

    @property
    def is_short(self) -> bool:
        """Whether the config has a short name for it."""
        return bool(self.name)

    @property
    def has_targets(self) -> bool:
        """Whether there is a ``_target_`` in it."""
        return not self.is_short or any(True for _ in nested_in(self.arguments, self.where))

    def signatures(self) -> Iterator[inspect.Signature]:
        """Yield what is known of the callable's signature, the surest last.

        Raises:
            ConfigError: There is no such callable.
            ModuleNotFoundError: An extra of this package is missing.
        """
        if self.path in ARGUMENTS_OF:
            kinds = [inspect.signature(kind) for kind in ARGUMENTS_OF[self.path]]
            yield inspect.Signature([each for kind in kinds for each in kind.parameters.values()])
        else:
            yield from signatures_of(self.path, may_import=not self.is_short)


def components_of(section: str, contents: Any) -> list[Component]:
    """Return what a section of a config names.

    Args:
        section: The section, a key of ``SHORT_NAMES``.
        contents: The section's values.

    Raises:
        ConfigError: A name is unknown or missing.
    """
    if not isinstance(contents, Mapping):
        raise ConfigError(f"{section}={contents!r} is not a section: write key: value pairs")
    if section not in NAMED_BY_FIELD:
        return [component_of(section, name, each or {}) for name, each in contents.items()]
    if not contents:
        return []
    if TARGET in contents:
        return [_by_target(contents, section)]
    if "name" not in contents:
        known = ", ".join(SHORT_NAMES[section])
        raise ConfigError(
            f"{section} lacks name: use one of {known}; or write {TARGET}: package.module.callable"
        )
    arguments = {key: value for key, value in contents.items() if key != "name"}
    return [component_of(section, contents["name"], arguments, where=section)]


def component_of(
    section: str, name: str, contents: Mapping[str, Any], where: str = ""
) -> Component:
    """Return the component of a short name, or of the ``_target_`` in its contents.

    Raises:
        ConfigError: The name is unknown, and there is no ``_target_``.
    """
    known = SHORT_NAMES[section]
    if not isinstance(contents, Mapping):
        raise ConfigError(f"{section}.{name}={contents!r}: write key: value pairs")
    if TARGET in contents and (section, name) != ("callbacks", "diloco"):
        return _by_target(contents, f"{section}.{name}")
    if name not in [*known]:  # which may be no string
        of = f"{section}.name" if section in NAMED_BY_FIELD else section
        raise ConfigError(
            f"{of} has no {name!r}: {closest(name, known)}; or write {TARGET}: "
            "package.module.callable"
        )
    return Component(known[name], contents, where or f"{section}.{name}", name)


def _by_target(contents: Mapping[str, Any], where: str) -> Component:
    arguments = {key: value for key, value in contents.items() if key != TARGET}
    return Component(contents[TARGET], arguments, where)


def nested_in(value: Any, where: str) -> Iterator[Component]:
    """Yield what each further ``_target_`` in a component's arguments names."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _at(item, f"{where}[{number}]")
    elif isinstance(value, Mapping) and value.get("_recursive_", True):
        for key, item in value.items():
            yield from _at(item, f"{where}.{key}")


def _at(value: Any, where: str) -> Iterator[Component]:
    if isinstance(value, Mapping) and TARGET in value:
        yield _by_target(value, where)
    yield from nested_in(value, where)
