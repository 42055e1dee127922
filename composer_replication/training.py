"""A YAML file becomes a Composer ``Trainer``, by hydra's ``instantiate``.

The keys at the top are the arguments of ``composer.Trainer``. The other keys of a section are the
arguments of what its ``_target_`` names. Composer is imported after the file has been checked.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from composer_replication.config_file import (
    SECTION,
    TARGET,
    ConfigError,
    diloco_section,
    model_section,
    read_diloco,
    read_yaml,
    reading,
    with_values,
)
from composer_replication.options import DuplicateIdError, ReplicaEnv, ReplicaOptions

if TYPE_CHECKING:
    from composer import ComposerModel, Trainer

    from composer_replication.callback import DiLoCoCallback

BY_NAME = ("algorithms", "callbacks", "loggers")
"""Sections with a section for each of their parts, under any name."""

OURS = ("num_replica_groups", "optimizers", "replica_rank", "run_dir", "save_folder", "variables")
"""Keys that ``build_trainer`` does not hand on as they are."""

OF_A_SHARD = re.compile(r"\$\{\s*(replica_rank|num_replica_groups)\b")
"""What names a group's shard of the data in a config."""

OF_THE_CONFIG = (TypeError, ValueError, LookupError, AttributeError, ImportError)
"""Errors of a bad value, which would come again at a restart. Faults of a network may pass."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config that ``train`` can use.

    Raises:
        ConfigError: The file is missing, a section has no ``_target_``, ``callbacks.diloco`` is
            missing or wrong, ``max_duration`` has no unit, or a ``${...}`` names no key.
    """
    config = read_yaml(Path(path), overrides)
    with reading(f"{path} cannot be resolved"):
        sharded = with_values(config, replica_rank=0, num_replica_groups=1)
        values: Any = OmegaConf.to_container(sharded, resolve=True)
    parts = dict(_parts_of(values))
    for name, part in parts.items():
        if not isinstance(part, Mapping) or TARGET not in part:
            raise ConfigError(f"{name} has no {TARGET}: name what builds it, by its import path")
    if SECTION not in parts:
        raise ConfigError(f"the config has no {SECTION}: see configs/quickstart.yaml")
    read_diloco(diloco_section(config))
    length = str(values.get("max_duration"))
    if not re.fullmatch(r"0*[1-9]\d*(ba|ep|sp|tok|sec|iter)", length):
        raise ConfigError(f"max_duration={length}: write 400ba (batches) or 2ep (epochs)")
    return config


def _parts_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sections of a config that have to name what they build, by their keys."""
    for name in ("model", "train_dataloader", "optimizers"):
        yield name, values.get(name)
    for name in ("eval_dataloader", "schedulers"):
        if isinstance(values.get(name), Mapping):
            yield name, values[name]
    for section in BY_NAME:
        named = values.get(section) or {}
        if not isinstance(named, Mapping):
            raise ConfigError(f"{section}={named!r}: write a name and its {TARGET} for each part")
        for name, part in named.items():
            if part is not None:
                yield f"{section}.{name}", part


def save_folder_of(config: Mapping[str, Any], replica_id: str | int) -> str | None:
    """The folder for a group's checkpoints, one for each group; None if the config asks for none.

    Raises:
        ConfigError: The config says how often to save, and no folder. Composer would save nothing.
    """
    save_folder = config.get("save_folder")
    interval = config.get("save_interval")
    run_dir = config.get("run_dir")
    if save_folder is None:
        if interval is None:
            return None
        if run_dir is None:
            raise ConfigError(
                f"save_interval={interval!r} without save_folder and without a run folder: no "
                "checkpoint would be saved. Set save_folder=..., or set run_dir=..."
            )
        save_folder = "checkpoints"
    group = f"replica_{replica_id}"
    if "://" in save_folder or Path(save_folder).is_absolute() or run_dir is None:
        return f"{save_folder.rstrip('/')}/{group}"
    return str(Path(run_dir) / group / save_folder)


def train(config: DictConfig) -> dict[str, Any]:
    """Train one replica group to the end. Its id and its addresses come from the environment.

    Args:
        config: From ``load_config``.

    Returns:
        The group's result: inner and outer steps, digest, final loss, evaluation.

    Raises:
        ConfigError: The config cannot be used.
    """
    from composer_replication.coordinator.membership import ask_for_run

    environ = ReplicaEnv.from_env()
    section = diloco_section(config)
    run_dir = environ.run_dir or config.get("run_dir") or section.get("run_dir")
    config = with_values(config, run_dir=run_dir)
    diloco = _callback(config, run_dir=run_dir)
    if diloco.options.coordinator_addr is not None:
        ask_for_run(diloco.options).check_model(model_section(config))
    trainer = build_trainer(config, diloco)
    return _fit(trainer, diloco)


def simulate_replicas(config: DictConfig, num_replicas: int) -> list[dict[str, Any]]:
    """Train several replica groups in this process, averaging through shared memory.

    Args:
        config: From ``load_config``.
        num_replicas: Number of replica groups.

    Returns:
        The result of each group, in the order of their ids.

    Raises:
        ConfigError: The config cannot be used.
        SimulationError: A group has failed.
    """
    from composer_replication.simulation.simulation import SimulationError, simulate

    # Initial weights are drawn from torch's default generator, which the threads share. Without
    # the lock, groups that are built at the same time would start from different weights.
    building = threading.Lock()

    def replica(sim: Any) -> dict[str, Any]:
        with building:
            diloco = _callback(
                config,
                manager=sim.manager,
                run_dir=config.get("run_dir"),
                replica_id=sim.replica_id,
                num_replicas=sim.num_replicas,
            )
            trainer = build_trainer(config, diloco)
        return _fit(trainer, diloco)

    try:
        return simulate(replica, num_replicas=num_replicas, timeout_s=None)
    except SimulationError as error:
        if isinstance(error.__cause__, ConfigError):
            # It is not one group's error: all were built from one config.
            raise error.__cause__ from None
        raise


def build_trainer(config: DictConfig, diloco: DiLoCoCallback) -> Trainer:
    """Build the Trainer of one replica group.

    Args:
        config: From ``load_config``.
        diloco: The group's callback. Its id is ``${replica_rank}`` where the config names that.

    Raises:
        ConfigError: Something that the config names cannot be built.
        ValueError: The group's id selects no shard of the data.
    """
    from composer import Trainer
    from composer.utils import reproducibility

    save_folder = save_folder_of(config, diloco.options.replica_id or 0)
    text = OmegaConf.to_yaml(config)
    if OF_A_SHARD.search(text):
        config = with_values(config, **_shard(diloco.options))
    values: Any = OmegaConf.to_container(config, resolve=True)
    del values["callbacks"]["diloco"]
    rest = {}
    for name, value in values.items():
        if name not in OURS and value is not None:
            rest[name] = value
    if rest.get("autoresume"):
        # Composer demands a name, which it does not use. Without save_overwrite it would refuse to
        # write again the checkpoints that came after the one from which the group continues.
        rest.setdefault("run_name", "diloco")
        rest.setdefault("save_overwrite", True)
    with _building("the config"):
        reproducibility.seed_all(rest.get("seed", 17))  # all groups start from the same weights
        built = _instantiate(rest)
    for section in BY_NAME:
        parts = built.get(section, {}).values()
        built[section] = [part for part in parts if part is not None]
    built["callbacks"].insert(0, diloco)
    with _building("optimizers"):
        built["optimizers"] = _optimizer_of(built["model"], config.optimizers)
    built["save_folder"] = save_folder
    built.setdefault("progress_bar", sys.stderr.isatty())
    with _building("composer.Trainer"):
        return Trainer(**built)


def _optimizer_of(model: ComposerModel, section: DictConfig) -> Any:
    build = _instantiate(section, _partial_=True)
    # Not the names for all: torch would save them in every checkpoint.
    if getattr(build.func, "needs_names", False):
        return build(model.named_parameters())
    return build(model.parameters())


def _callback(config: DictConfig, **own: Any) -> DiLoCoCallback:
    with _building(SECTION):
        build = _instantiate(config.callbacks.diloco, _partial_=True)
        return build(**own)


def _instantiate(config: Any, **how: Any) -> Any:
    """Build what a section names. Objects go to a partial: hydra itself would copy them."""
    # As for `python -m`: the command's own folder would be that of the script composer-replication.
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    return instantiate(config, _convert_="all", **how)


@contextmanager
def _building(what: str) -> Iterator[None]:
    """Raise an error of the config, Python's or hydra's, as a ``ConfigError`` of one line.

    Another error of what hydra builds is a ``RuntimeError`` that names the section, and an
    ``OSError`` stays what it is.
    """
    try:
        yield
    except DuplicateIdError:
        raise  # the name may be free the next time
    except (InstantiationException, *OF_THE_CONFIG) as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError):
            raise cause from None  # of a network or a disk: it may pass
        said = f"{what}: {error}"
        if str(cause) not in str(error):
            said += f": {cause}"
        if not isinstance(cause, (*OF_THE_CONFIG, InstantiationException)):
            raise RuntimeError(" ".join(said.split())) from cause
        if isinstance(cause, AttributeError | LookupError):  # rather of the code than of a value
            at = traceback.extract_tb(cause.__traceback__)[-1]
            said += f" ({Path(at.filename).name}:{at.lineno})"
        raise ConfigError(" ".join(said.split())) from error


def _shard(options: ReplicaOptions) -> dict[str, int]:
    """Which part of the samples this group reads, and of how many."""
    from composer_replication.coordinator.membership import ask_for_run
    from composer_replication.data.sample_stream import shard_of

    groups = options.num_replicas
    if options.coordinator_addr is not None:
        groups = ask_for_run(options).num_replicas  # before the callback takes them over
    groups = groups or 1
    return {
        "replica_rank": shard_of(options.replica_id or 0, groups),
        "num_replica_groups": groups,
    }


def _fit(trainer: Trainer, diloco: DiLoCoCallback) -> dict[str, Any]:
    with closing(trainer):
        trainer.fit()
    return diloco.result
