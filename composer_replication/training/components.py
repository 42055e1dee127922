"""The callables that a config names: by an import path in ``_target_``, or by a short name.

They are strings, so that a config is checked without importing torch or Composer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from composer_replication.arguments import closest

TARGET = "_target_"

_LOADERS = {
    "text": "composer_replication.training.loaders.build_text_loader",
    "dataset": "composer_replication.training.loaders.build_dataset_loader",
}

SHORT_NAMES: dict[str, dict[str, str]] = {
    "model": {"byte_gpt": "composer_replication.training.byte_gpt.ByteGPT"},
    "train_loader": _LOADERS,
    "eval_loader": _LOADERS,
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
        "diloco": "composer_replication.callback.DiLoCoCallback",
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


MOST_NAMES = 12
"""The most names that a message lists, since people read it as one line."""


class ConfigError(ValueError):
    """A config is wrong. The message names the key, the value, and the fix."""


def components_of(section: str, contents: Any) -> dict[str, dict[str, Any]]:
    """Return the components that a section of a config names, as hydra's ``instantiate`` has them.

    Args:
        section: The section, a key of ``SHORT_NAMES``.
        contents: The section's values.

    Returns:
        For each component its place in the config, such as ``callbacks.lr_monitor``, and its
        arguments with a ``_target_``.

    Raises:
        ConfigError: A name is unknown or missing.
    """
    _check_mapping(section, contents)
    if section not in NAMED_BY_FIELD:
        return {
            f"{section}.{name}": _by_key(section, name, each) for name, each in contents.items()
        }
    if not contents:
        return {}
    if TARGET in contents:
        return {section: dict(contents)}
    if "name" not in contents:
        known = ", ".join(SHORT_NAMES[section])
        raise ConfigError(
            f"{section} lacks name: use one of {known}; or write {TARGET}: package.module.callable"
        )
    arguments = {key: value for key, value in contents.items() if key != "name"}
    return {section: {TARGET: _path(section, f"{section}.name", contents["name"]), **arguments}}


def _by_key(section: str, name: str, contents: Any) -> dict[str, Any]:
    where = f"{section}.{name}"
    contents = {} if contents is None else contents
    _check_mapping(where, contents)
    if TARGET in contents and where != "callbacks.diloco":
        return dict(contents)
    return {TARGET: _path(section, section, name), **contents}


def _path(section: str, where: str, name: object) -> str:
    known = SHORT_NAMES[section]
    if name not in [*known]:  # ``name`` may be of any type
        raise ConfigError(
            f"{where} has no {name!r}: {hint(name, known)}; or write {TARGET}: "
            "package.module.callable"
        )
    return known[str(name)]


def _check_mapping(where: str, contents: Any) -> None:
    if not isinstance(contents, Mapping):
        raise ConfigError(f"{where}={contents!r} is not a section: write key: value pairs")


def check_keys(
    keys: Iterable[object],
    allowed: Iterable[str],
    where: str,
    removed: Mapping[str, str] | None = None,
) -> None:
    """Reject an unknown key, and suggest the closest allowed one.

    Args:
        keys: The keys to check.
        allowed: The keys that exist.
        where: The section, for the message.
        removed: Keys of the previous version, and what to use in place of each.

    Raises:
        ConfigError: A key is not allowed.
    """
    allowed = sorted(allowed)
    for key in keys:
        if key in allowed:
            continue
        if removed and key in removed:
            raise ConfigError(f"{where} has no {key!r} any more: {removed[str(key)]}")
        raise ConfigError(f"{where} has no {key!r}: {hint(key, allowed)}")


def hint(name: object, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest allowed one, or the first of all."""
    allowed = sorted(allowed)
    if close := closest(name, allowed):
        return f"did you mean {close!r}?"
    more = f" or {len(allowed) - MOST_NAMES} more" if len(allowed) > MOST_NAMES else ""
    names = ", ".join(allowed[:MOST_NAMES])
    return f"use one of {names}{more}" if allowed else "leave it out"
