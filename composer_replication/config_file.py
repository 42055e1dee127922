"""Reads YAML files: those that ``training`` trains, and the settings of a run in any job's.

It imports neither torch nor Composer, so that what is wrong in a file is said at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # omegaconf's own parser

from composer_replication.arguments import among, closest
from composer_replication.options import OptionKeywords, ReplicaOptions
from composer_replication.settings import DiLoCoSettings, SettingKeywords
from composer_replication.util.json_files import naming

TARGET = "_target_"
SECTION = "callbacks.diloco"
EXAMPLE = "callbacks: {diloco: {sync_every: 100}}"

OF_THE_RUN = (
    *SettingKeywords.__annotations__,
    *("digest_every", "min_replica_size", "num_replicas"),
)
"""What a coordinator reads of the section. The other keys belong to a group and its machine."""

KNOWN = {*OF_THE_RUN, *OptionKeywords.__annotations__}

WHOLE_LIST = "write the whole list, e.g. key=[1,2]"
"""The fix where one entry of a list was to be replaced, which OmegaConf cannot."""

OF_A_JOB = ("callbacks", "max_duration", "model")
"""A file with one of these is a job's; any other has settings alone."""


class ConfigError(ValueError):
    """A config is wrong. The message names the key, the value, and the fix."""


@contextlib.contextmanager
def reading(problem: str, fix: str = "") -> Iterator[None]:
    """Raise a parser's error as a ``ConfigError`` of one line: the problem, what it said, a fix."""
    try:
        yield
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        text = re.sub(r"\s+object_type=\w+", "", " ".join(str(error).split()))
        text = re.sub(r'in "[^"]*/([^"/]+)"', r"in \1", text)  # not the folders of its file
        raise ConfigError(f"{problem} ({text}): {fix}" if fix else f"{problem}: {text}") from error


def read_yaml(path: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a YAML file with ``key=value`` overrides; ``${...}`` in it is not resolved.

    Raises:
        ConfigError: It is missing, or holds no keys and values; or an override is no key=value.
    """
    if not path.is_file():
        raise ConfigError(f"there is no config at {path}: give the path of a YAML file")
    with reading(f"{path} cannot be read as YAML"):
        loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} holds no key: value pairs: write e.g. sync_every: 100")
    changed = read_overrides(overrides, "override", "max_duration=100ba")
    with reading(f"override {' '.join(overrides)} does not fit into {path}", WHOLE_LIST):
        loaded.merge_with(changed)
    return loaded


def read_overrides(given: Sequence[str], what: str, example: str) -> DictConfig:
    """Read ``key=value`` pairs, which messages call ``what`` and of which they show an example."""
    for each in given:
        if "=" not in each:
            raise ConfigError(f"{what} {each!r}: write key=value, e.g. {example}")
    with reading(f"{what} {' '.join(given)} cannot be read"):
        return OmegaConf.from_dotlist(list(given))


def read_unresolved(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a job's file with ``key=value`` overrides, and ``${...}`` as they stand in it.

    Raises:
        ConfigError: It is missing, or cannot be read.
    """
    plain: Any = OmegaConf.to_container(read_yaml(path, overrides))
    return plain


def save_config(config: Mapping[str, Any], path: Path) -> None:
    """Write a config that only its owner can read; ``${oc.env:NAME}`` in it stays as it is.

    Raises:
        OSError: The file cannot be written.
    """
    path.touch(0o600)
    path.chmod(0o600)  # it may exist
    with naming(path):
        OmegaConf.save(OmegaConf.create(config), path)  # pyright: ignore


def with_values(config: Mapping[str, Any], **values: Any) -> DictConfig:
    """The config with other values at its top, and the rest with its ``${...}`` as they are."""
    merged = OmegaConf.merge(config, values)  # pyright: ignore
    assert isinstance(merged, DictConfig), "of two mappings OmegaConf makes one"
    return merged


def diloco_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and options in ``callbacks.diloco``, with ``${...}`` resolved."""
    section = _resolved(config, SECTION)
    return {name: value for name, value in section.items() if name != TARGET}


def model_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``model``, to compare with other groups; empty if only the job can read it."""
    try:
        return _resolved(config, "model")
    except OmegaConfBaseException:  # the job's own resolvers
        return {}


def _resolved(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = OmegaConf.select(OmegaConf.create(config), name)  # pyright: ignore
    values: Any = OmegaConf.to_container(section, resolve=True) if section else {}
    return values


def read_diloco(section: Mapping[str, Any]) -> tuple[DiLoCoSettings, ReplicaOptions]:
    """The run's settings and the group's options in ``callbacks.diloco``, which it checks.

    Raises:
        ConfigError: A key is unknown, or a value is impossible.
    """
    check_keys(section, SECTION)
    try:
        settings = DiLoCoSettings(**among(section, SettingKeywords))
        return settings, ReplicaOptions(**among(section, OptionKeywords))
    except ValueError as error:
        raise ConfigError(f"{SECTION}: {error}") from error


def check_keys(keys: Iterable[object], where: str) -> None:
    """Refuse a key that is neither a setting nor an option, with the closest one that is.

    Raises:
        ConfigError: A key is unknown.
    """
    for key in map(str, keys):
        if key in KNOWN or key == TARGET:
            continue
        close = closest(key, KNOWN)
        fix = f"did you mean {close!r}?" if close else "see the arguments of DiLoCoCallback"
        raise ConfigError(f"{where} has no {key!r}: {fix}")


# ---- the settings of a run in any job's file ---------------------------------------------------


def load_settings(
    path: Path | None,
    given: Sequence[str] = (),
    also: Sequence[str] = (),
) -> tuple[dict[str, Any], str, list[str]]:
    """Read what a coordinator needs of a job's file, and no more.

    The file may be a config of ours, an llm-foundry YAML, or one with settings alone. The rest of
    it belongs to the job: it may have keys that this package does not know, and ``${...}`` that
    only the job can resolve.

    Args:
        path: The file. None: every setting has its default.
        given: Settings in place of the file's, such as ``sync_every=50``.
        also: Options of a group that are read too, because its launcher follows them.

    Returns:
        A config with ``callbacks.diloco``, and with ``model`` if the file has one that can be
        resolved; where the settings come from, for people; and the keys of ``callbacks.diloco``
        that are left out, since they are each group's own.

    Raises:
        ConfigError: The file is missing or has no settings, or one is unknown or impossible.
    """
    replaced, sources = _parse_settings(given), [f"--set {each}" for each in given]
    section, where = OmegaConf.create(), "--set"
    config: dict[str, Any] = {}
    if path is not None:
        if "=" in str(path):
            raise ConfigError(
                f"there is no config at {path}: a setting goes behind --set, as in --set {path}"
            )
        file = read_yaml(path)
        section, where = _settings_section(file, path)
        config = {"model": model} if (model := model_section(file)) else {}
        check_keys(section, where)
        sources.insert(0, str(path))
    read = (*OF_THE_RUN, *also)
    left_out = [str(name) for name in section if name not in (*read, TARGET)]
    with reading(f"--set {' '.join(given)} does not fit into {where}", WHOLE_LIST):
        section.merge_with(replaced)  # not resolved yet: it may replace what only the job can
    values = {name: _setting(section, name, where) for name in read if name in section}
    read_diloco(values)
    config["callbacks"] = {"diloco": values}
    return config, " ".join(sources) or "the defaults", left_out


def _settings_section(file: DictConfig, path: Path) -> tuple[DictConfig, str]:
    """The node with the settings, with nothing resolved, and its name for messages."""
    if not file:
        raise ConfigError(f"{path} is empty: write settings, such as sync_every: 100")
    if not any(key in file for key in OF_A_JOB):
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


def _parse_settings(given: Sequence[str]) -> DictConfig:
    parsed = read_overrides(given, "--set", "--set sync_every=100")
    for each in given:
        if each.startswith(f"{SECTION}."):
            raise ConfigError(f"--set {each}: write --set {each.removeprefix(f'{SECTION}.')}")
        name = each.partition("=")[0]
        if name in KNOWN and name not in OF_THE_RUN:
            raise ConfigError(
                f"--set {each}: {name} is no setting of the run; give it to DiLoCoCallback (its "
                f"YAML key is {SECTION}.{name}) in each group"
            )
    check_keys(parsed, "--set")
    return parsed


def _setting(section: DictConfig, name: str, where: str) -> Any:
    written = OmegaConf.to_container(section)[name]  # pyright: ignore
    with reading(
        f"{where}: {name}={written!r} cannot be resolved",
        f"write the value, or give it with --set {name}=...",
    ):
        value = section[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
