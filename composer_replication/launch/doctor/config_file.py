"""Reads the config that is to be checked: one of ours, or any YAML with ``callbacks.diloco``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_replication.training.config import (
    REQUIRED,
    TOP_LEVEL,
    ConfigError,
    diloco_section,
    read_config,
)

LLM_FOUNDRY = ("tokenizer", "max_seq_len")
"""Keys that llm-foundry requires beside those that its files and ours have in common."""


@dataclass(frozen=True)
class ConfigFile:
    """A config, as far as ``doctor`` can judge it.

    Args:
        values: All of it; empty without a file.
        written: The same as the file has it, with ``${...}``.
        section: The DiLoCo settings and options.
        is_ours: Whether ``train`` and ``launch`` can train it; otherwise it is another program's,
            such as llm-foundry's.
    """

    values: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Any] = field(default_factory=dict)
    section: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = False


def read_file(path: Path, overrides: Sequence[str]) -> ConfigFile:
    """Read a config of any kind.

    Args:
        path: The YAML file: a config of ours, another program's, or one with settings alone.
        overrides: Values to replace.

    Raises:
        ConfigError: It cannot be read, or has no DiLoCo settings.
    """
    try:
        values = read_config(path, overrides)
    except ConfigError:
        values = read_config(path, overrides, resolve=False)
        if _is_ours(values):
            raise  # another program may resolve ${...} that nothing here can
    callbacks = values.get("callbacks")
    if "callbacks" not in values and not any(key in values for key in REQUIRED):
        return ConfigFile(section=dict(values))
    if not isinstance(callbacks, Mapping) or "diloco" not in callbacks:
        raise ConfigError(
            f"{path} has no callbacks.diloco: add it, e.g. "
            "`callbacks: {diloco: {sync_every: 100}}`"
        )
    if not isinstance(callbacks["diloco"] or {}, Mapping):
        raise ConfigError(
            f"{path} has callbacks.diloco={callbacks['diloco']!r}: write key: value pairs"
        )
    return ConfigFile(dict(values), values.written, diloco_section(values), _is_ours(values))


def _is_ours(values: Mapping[str, Any]) -> bool:
    """Whether a file is meant for ``train``, though perhaps with one misspelt key."""
    unknown = [key for key in values if key not in TOP_LEVEL]
    missing = [key for key in REQUIRED if key not in values]
    is_llmfoundrys = any(key in values for key in LLM_FOUNDRY)
    return not is_llmfoundrys and len(unknown) <= 1 and len(missing) <= 1
