"""Reads a YAML file into a checked, plain config, and the settings of a run from any job's.

This module imports neither torch nor Composer, so that a bad config is rejected at once. It is the
only one that uses OmegaConf; the others receive dicts.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # omegaconf's own parser

from composer_replication.arguments import among, check_choice, check_integer
from composer_replication.options import OptionKeywords, ReplicaOptions
from composer_replication.replica.json_files import naming
from composer_replication.settings import DiLoCoSettings, SettingKeywords
from composer_replication.training.components import SHORT_NAMES, TARGET, check_keys, components_of
from composer_replication.training.components import ConfigError as ConfigError
from composer_replication.training.text_files import check_text_folder

REQUIRED = ("model", "train_loader", "optimizer", "max_duration", "global_train_batch_size")

TRAINER_ARGUMENTS = (
    *("autoresume", "console_log_interval", "device", "device_train_microbatch_size"),
    *("dist_timeout", "eval_interval", "eval_subset_num_batches", "load_path", "load_weights_only"),
    *("log_to_console", "max_duration", "precision", "run_name", "save_interval"),
    *("save_num_checkpoints_to_keep", "save_overwrite", "seed", "train_subset_num_batches"),
)
"""Keys that are passed to ``composer.Trainer`` unchanged."""

TOP_LEVEL = (
    *REQUIRED,
    *TRAINER_ARGUMENTS,
    *("algorithms", "callbacks", "device_eval_batch_size", "eval_loader", "loggers"),
    *("progress_bar", "reference", "run_dir", "save_folder", "scheduler", "variables"),
)
"""Keys of a config, with llm-foundry's names. ``variables`` holds values of the user's own."""

REFERENCE = ("data_parallel_bits_per_byte", "text", "tokens")
"""Keys of ``reference``: what data parallel reaches on a text, after so many tokens."""


INTEGERS = {"device_eval_batch_size": 1, "global_train_batch_size": 1, "seed": 0}
"""Keys of a config that hold integers, and the smallest of each."""

LOADERS_INTEGERS = {"max_seq_len": 1, "num_workers": 0, "seed": 0, "unit_size": 1}
"""Keys of our loaders' sections that hold integers, and the smallest of each."""


SECTION = "callbacks.diloco"
EXAMPLE = "callbacks: {diloco: {sync_every: 100}}"

OF_THE_RUN = (
    *SettingKeywords.__annotations__,
    *("digest_every", "min_replica_size", "num_replicas"),
)
"""What a coordinator reads of the section. The other keys belong to a group and its machine."""

_OF_A_GROUP = {*OptionKeywords.__annotations__} - {*OF_THE_RUN}
_KNOWN = (*OF_THE_RUN, *_OF_A_GROUP)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file, apply ``key=value`` overrides, and check the config.

    Args:
        path: The YAML file.
        overrides: Values to replace, such as ``callbacks.diloco.sync_every=50``.

    Returns:
        The config as a plain dict, with ``${...}`` resolved.

    Raises:
        ConfigError: The file is missing, or a key or a value is wrong.
    """
    return check_config(read_config(path, overrides))


def read_config(path: str | Path, overrides: Sequence[str] = (), *, resolve: bool = True) -> Config:
    """Read a YAML file of any kind, and apply overrides, without judging its keys and values.

    Args:
        path: The YAML file.
        overrides: Values to replace.
        resolve: Whether to resolve ``${...}``. Another program may have resolvers of its own.

    Returns:
        The config as a plain dict.

    Raises:
        ConfigError: The file is missing, or cannot be read or resolved.
    """
    given = parse_overrides(overrides, "override", "max_duration=100ba")
    loaded = load_yaml(Path(path), "give the path of a YAML file")
    with reading(f"{path} cannot be read"):
        merged = OmegaConf.merge(loaded, given)
        resolved = OmegaConf.to_container(merged, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(resolved, dict) and isinstance(merged, DictConfig), "the file is no list"
    return Config({str(key): value for key, value in resolved.items()}, merged)


def parse_overrides(given: Sequence[str], what: str, example: str) -> DictConfig:
    """Read ``key=value`` overrides.

    Args:
        given: The overrides.
        what: What they are called, for the message.
        example: One of them, for the message.

    Raises:
        ConfigError: One of them is no ``key=value``, or its value is no YAML.
    """
    for each in given:
        if "=" not in each:
            raise ConfigError(f"{what} {each!r}: write key=value, e.g. {example}")
    with reading(f"{what} {' '.join(given)} cannot be read"):
        return OmegaConf.from_dotlist(list(given))


def load_yaml(path: Path, fix: str) -> DictConfig:
    """Read a YAML file as OmegaConf holds it, with ``${...}`` unresolved.

    Args:
        path: The file.
        fix: What to do if it is missing, for the message.

    Raises:
        ConfigError: It is missing, or no YAML, or has no keys and values.
    """
    if not path.is_file():
        raise ConfigError(f"there is no config at {path}: {fix}")
    with reading(f"{path} cannot be read as YAML"):
        loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path} holds no key: value pairs: write e.g. sync_every: 100")
    return loaded


@contextlib.contextmanager
def reading(problem: str, fix: str = "") -> Iterator[None]:
    """Raise a parser's error as a ``ConfigError`` of one line.

    Args:
        problem: What could not be done, for the message.
        fix: What to do about it, for the message.
    """
    try:
        yield
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        text = re.sub(r"\s+object_type=\w+", "", " ".join(str(error).split()))
        text = re.sub(r'in "[^"]*/([^"/]+)"', r"in \1", text)  # not the folders of its file
        raise ConfigError(f"{problem} ({text}): {fix}" if fix else f"{problem}: {text}") from error


class Config(dict[str, Any]):
    """A config as a plain dict that also knows which of its values were ``${...}`` in the file.

    Args:
        values: The resolved values.
        source: The same config as OmegaConf holds it, with ``${...}`` unresolved.
    """

    def __init__(self, values: Mapping[str, Any], source: DictConfig) -> None:
        super().__init__(values)
        self.source = source

    def __or__(self, changes: Mapping[str, Any]) -> Config:  # type: ignore[override]
        return Config({**self, **changes}, self.source)


def _unresolved(value: Any, resolved: Any, written: Any) -> Any:
    """A value with ``${...}`` where the file has it and the value has not changed."""
    if value == resolved:
        return written
    if isinstance(value, dict) and isinstance(resolved, dict) and isinstance(written, dict):
        return {
            key: _unresolved(value[key], resolved[key], written[key]) if key in resolved else item
            for key, item in value.items()
        }
    return value


def diloco_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``callbacks.diloco``; empty if it is left empty."""
    return (config.get("callbacks") or {}).get("diloco") or {}


def is_text(loader: Mapping[str, Any]) -> bool:
    """Whether a loader's section names our loader of text."""
    return TARGET not in loader and loader.get("name") == "text"


def save_config(config: Mapping[str, Any], path: str | Path) -> None:
    """Write a config as a YAML file that only its owner can read.

    A value that came from ``${oc.env:NAME}`` is written as ``${oc.env:NAME}``: it may be a secret.
    It is resolved again when the file is read.

    Args:
        config: The config.
        path: The file, which is overwritten.

    Raises:
        OSError: The file cannot be written.
    """
    values = dict(config)
    if isinstance(config, Config):
        resolved = OmegaConf.to_container(config.source, resolve=True)
        values = _unresolved(values, resolved, OmegaConf.to_container(config.source))
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with naming(Path(path)), open(number, "w") as file:
        os.fchmod(number, 0o600)  # os.open does not change the mode of an existing file
        OmegaConf.save(OmegaConf.create(values), file)


def read_value(path: Path, key: str) -> Any:
    """Read one value of a config file.

    Args:
        path: The file.
        key: The key, with dots between the sections.

    Returns:
        The value; None if the file is missing or damaged, or has no such key.
    """
    try:
        return OmegaConf.select(OmegaConf.load(path), key)
    except (OSError, ValueError, OmegaConfBaseException, YAMLError):
        return None


def check_config(config: dict[str, Any]) -> dict[str, Any]:
    """Check the keys, the names, the DiLoCo settings and the text folders of a config.

    Returns:
        The same config.

    Raises:
        ConfigError: Something is wrong. The message names it and the fix.
    """
    check_keys(config, TOP_LEVEL, "the config")
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise ConfigError(f"the config lacks {', '.join(missing)}: see configs/quickstart.yaml")
    if not re.fullmatch(r"\d+(ba|ep|sp|tok|sec|iter)", length := str(config["max_duration"])):
        number = length if length.isdecimal() else "400"
        raise ConfigError(
            f"max_duration={config['max_duration']!r}: write {number}ba (batches) or {number}ep "
            "(epochs)"
        )
    if config.get("autoresume") and not any(map(config.get, ("save_folder", "save_interval"))):
        raise ConfigError(
            f"autoresume={config['autoresume']!r} without save_folder: nothing is saved that the "
            "run could resume from. Set save_folder=checkpoints (it lies in replica_<id>/ below "
            "the run's folder), and how often to save with save_interval=..."
        )
    _check_integers(config, INTEGERS)
    for section in SHORT_NAMES:
        components_of(section, config.get(section) or {})
    if "diloco" not in (config.get("callbacks") or {}):
        raise ConfigError("the config lacks callbacks.diloco: see configs/quickstart.yaml")
    read_diloco(diloco_section(config))
    check_keys(config.get("reference") or {}, REFERENCE, "reference")
    for section in ("train_loader", "eval_loader"):
        loader = config.get(section) or {}
        if "name" in loader and TARGET not in loader:
            _check_loader(section, loader)
        if loader and is_text(loader):
            try:
                check_text_folder(loader.get("path"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{section}.path: {error}") from error
    return config


def _check_integers(values: Mapping[str, Any], least: Mapping[str, int], where: str = "") -> None:
    for key, at_least in least.items():
        if values.get(key) is not None:
            check_integer(f"{where}{key}", values[key], at_least=at_least)


def _check_loader(section: str, loader: Mapping[str, Any]) -> None:
    """Check what one of our own loaders would reject in every group, after seconds of imports."""
    _check_integers(loader, LOADERS_INTEGERS, f"{section}.")
    check_choice(f"{section}.shards", loader.get("shards"), (None, "fixed", "leased"))
    is_misspelt = difflib.get_close_matches("dataset", map(str, loader.keys() - {"dataset_id"}))
    if loader["name"] == "dataset" and not loader.get("dataset") and not is_misspelt:
        raise ConfigError(
            f"{section}.dataset={loader.get('dataset')!r}: write dataset: {{{TARGET}: "
            "package.module.callable}, a function or class that returns the dataset"
        )


def read_diloco(section: Mapping[str, Any]) -> tuple[DiLoCoSettings, ReplicaOptions]:
    """The run's settings and the group's options in ``callbacks.diloco``, which it checks.

    Raises:
        ConfigError: A key is unknown or has been removed, or a value is impossible.
    """
    check_keys(section, _KNOWN, SECTION)
    try:
        settings = DiLoCoSettings(**among(section, SettingKeywords))
        return settings, ReplicaOptions(**among(section, OptionKeywords))
    except ValueError as error:
        raise ConfigError(f"{SECTION}: {error}") from error


# ---- the settings of a run in any job's file ---------------------------------------------------


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
    replaced, sources = _parse_settings(given), [f"--set {each}" for each in given]
    section, where = OmegaConf.create(), "--set"
    config: dict[str, Any] = {"left_out": []}
    if path is not None:
        fix = "give the path of a YAML file, or none and --set key=value"
        is_set = f"a setting goes behind --set, as in --set {path}"
        file = load_yaml(path, is_set if "=" in str(path) else fix)
        section, where = _settings_section(file, path)
        check_keys(map(str, section), _KNOWN, where)
        config["left_out"] = [str(name) for name in section if name not in OF_THE_RUN]
        config |= _model_section(file)
        sources.insert(0, str(path))
    section.merge_with(replaced)  # before it is resolved: --set may replace what only the job can
    values = {name: _setting(section, name, where) for name in OF_THE_RUN if name in section}
    read_diloco(values)
    config["callbacks"] = {"diloco": values}
    return config, " ".join(sources) or "the defaults"


def _settings_section(file: DictConfig, path: Path) -> tuple[DictConfig, str]:
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


def _parse_settings(given: Sequence[str]) -> DictConfig:
    for each in given:
        if each.startswith(f"{SECTION}."):
            raise ConfigError(f"--set {each}: write --set {each.removeprefix(f'{SECTION}.')}")
        if (name := each.partition("=")[0]) in _OF_A_GROUP:
            raise ConfigError(
                f"--set {each}: {name} is no setting of the run; give it to DiLoCoCallback (its "
                f"YAML key is {SECTION}.{name}) in each group"
            )
    parsed = parse_overrides(given, "--set", "--set sync_every=100")
    check_keys(map(str, parsed), _KNOWN, "--set")
    return parsed


def _setting(section: DictConfig, name: str, where: str) -> Any:
    written = OmegaConf.to_container(section)[name]  # pyright: ignore
    with reading(
        f"{where}: {name}={written!r} cannot be resolved",
        f"write the value, or give it with --set {name}=...",
    ):
        value = section[name]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _model_section(file: DictConfig) -> dict[str, Any]:
    """The section ``model``, which groups of ours compare with theirs, if there is one."""
    try:
        model = OmegaConf.select(file, "model")
        values = OmegaConf.to_container(model, resolve=True) if OmegaConf.is_dict(model) else None
    except OmegaConfBaseException:  # the job's own resolvers: no config of ours has one
        return {}
    return {"model": values} if values else {}
