"""Reads the settings of a run from any job's YAML file. Imports neither torch nor Composer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_replication.arguments import REMOVED
from composer_replication.options import ReplicaOptions
from composer_replication.settings import DiLoCoSettings
from composer_replication.training.components import check_keys
from composer_replication.training.config import (
    REQUIRED,
    ConfigError,
    load_yaml,
    parse_overrides,
    read_diloco,
    reading,
)

SECTION = "callbacks.diloco"
EXAMPLE = "callbacks: {diloco: {sync_every: 100}}"

OF_THE_RUN = (
    *(field.name for field in fields(DiLoCoSettings)),
    *("digest_every", "min_replica_size", "num_replicas"),
)
"""What a coordinator reads of the section. The other keys belong to a group and its machine."""

_OF_A_GROUP = {field.name for field in fields(ReplicaOptions)} - {*OF_THE_RUN}


def load_settings(path: Path | None, given: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """Read what a coordinator needs of a job's file, and no more.

    The file may be a config of ours, an llm-foundry YAML, or one with settings alone. Only
    ``callbacks.diloco`` is read, or the whole file if it has settings alone. The rest belongs to
    the job: it may have keys that this package does not know, and ``${...}`` that only the job can
    resolve.

    Args:
        path: The file. None: every setting has its default.
        given: Settings in place of the file's, such as ``sync_every=50``.

    Returns:
        A config with ``callbacks.diloco``, with ``model`` if the file has one that can be resolved,
        and with ``left_out``, the keys of ``callbacks.diloco`` that are each group's own; and where
        the settings come from, for people.

    Raises:
        ConfigError: The file is missing or has no settings, or one is unknown or impossible.
    """
    replaced, sources = _parse(given), [f"--set {each}" for each in given]
    section, where = OmegaConf.create(), "--set"
    config: dict[str, Any] = {"left_out": []}
    if path is not None:
        fix = "give the path of a YAML file, or none and --set key=value"
        is_set = f"a setting goes behind --set, as in --set {path}"
        file = load_yaml(path, is_set if "=" in str(path) else fix)
        section, where = _section(file, path)
        _check_names(section, where)
        config["left_out"] = [str(name) for name in section if name not in OF_THE_RUN]
        config |= _model(file)
        sources.insert(0, str(path))
    section.merge_with(replaced)  # before it is resolved: --set may replace what only the job can
    values = {name: _value(section, name, where) for name in OF_THE_RUN if name in section}
    read_diloco(values)
    config["callbacks"] = {"diloco": values}
    return config, " ".join(sources) or "the defaults"


def in_words(settings: DiLoCoSettings) -> str:
    """Name the length of a round, and the settings that are not the defaults."""
    default = asdict(DiLoCoSettings())
    named = asdict(settings).items()
    own = [f"{k}={v}" for k, v in named if k == "sync_every" or v != default[k]]
    return ", ".join(own)


def _section(file: DictConfig, path: Path) -> tuple[DictConfig, str]:
    """The node with the settings, with nothing resolved, and its name for messages."""
    if not file:
        raise ConfigError(f"{path} is empty: write settings, such as sync_every: 100")
    if not any(key in file for key in ("callbacks", *REQUIRED)):
        return file, str(path)
    with reading(f"{path}: {SECTION} cannot be read"):
        section = OmegaConf.select(file, SECTION, default="missing")
    if section == "missing":
        raise ConfigError(
            f"{path} is a job without {SECTION}: add it ({EXAMPLE}), or give a file with "
            "settings alone, or none and --set key=value"
        )
    section = OmegaConf.create() if section is None else section
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{path}: {SECTION}={section!r}: write key: value pairs ({EXAMPLE})")
    return section, f"{path}: {SECTION}"


def _parse(given: Sequence[str]) -> DictConfig:
    for each in given:
        if each.startswith(f"{SECTION}."):
            raise ConfigError(f"--set {each}: write --set {each.removeprefix(f'{SECTION}.')}")
        if (name := each.partition("=")[0]) in _OF_A_GROUP:
            raise ConfigError(
                f"--set {each}: {name} is no setting of the run; give it to DiLoCoCallback (its "
                f"YAML key is {SECTION}.{name}) in each group"
            )
    parsed = parse_overrides(given, "--set", "--set sync_every=100")
    _check_names(parsed, "--set")
    return parsed


def _check_names(section: DictConfig, where: str) -> None:
    check_keys(map(str, section), {*OF_THE_RUN, *_OF_A_GROUP}, where, REMOVED)


def _value(section: DictConfig, name: str, where: str) -> Any:
    written = OmegaConf.to_container(section)[name]  # pyright: ignore
    with reading(
        f"{where}: {name}={written!r} cannot be resolved",
        f"write the value, or give it with --set {name}=...",
    ):
        value = section[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _model(file: DictConfig) -> dict[str, Any]:
    """The section ``model``, which groups of ours compare with theirs, if there is one."""
    try:
        model = OmegaConf.select(file, "model")
        values = OmegaConf.to_container(model, resolve=True) if OmegaConf.is_dict(model) else None
    except OmegaConfBaseException:  # the job's own resolvers: no config of ours has one
        return {}
    return {"model": values} if values else {}
