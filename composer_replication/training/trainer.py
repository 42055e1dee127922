"""Builds a Composer Trainer from a config, and trains one replica group or simulated ones."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from typing import Any

from composer import ComposerModel, Trainer
from composer.utils import dist, reproducibility
from torch.optim import Optimizer

from composer_replication.callback import DiLoCoCallback
from composer_replication.coordinator.membership import ask_for_run
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.data.sample_stream import shard_of
from composer_replication.group.run_folder import ReplicaFolder
from composer_replication.options import ReplicaOptions
from composer_replication.simulation.simulation import SimulatedReplica, SimulationError, simulate
from composer_replication.training.building import (
    build_all,
    build_one,
    composers_errors_in_the_config,
    find_all,
)
from composer_replication.training.components import TARGET
from composer_replication.training.config import (
    TRAINER_ARGUMENTS,
    ConfigError,
    diloco_section,
    is_text,
)
from composer_replication.training.preflight import run_dir_of, save_folder_of
from composer_replication.training.text_files import check_text_folder, unigram_bits_per_byte

log = logging.getLogger(__name__)


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train one replica group to the end. Its id and its addresses come from the environment.

    Args:
        config: From ``load_config``.

    Returns:
        The group's result: inner and outer steps, digest, final loss, evaluation.

    Raises:
        ConfigError: The config cannot be used.
    """
    config = config | {"run_dir": run_dir_of(config)}
    section = {"run_dir": config["run_dir"]} | diloco_section(config)
    callback = build_one("callbacks", {"diloco": section})
    return _fit(build_trainer(config, callback), callback, config)


def simulate_replicas(config: dict[str, Any], num_replicas: int) -> list[dict[str, Any]]:
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
    # Initial weights are drawn from torch's default generator, which the threads share. Without
    # the lock, groups that are built at the same time would start from different weights.
    building = threading.Lock()

    def replica(sim: SimulatedReplica) -> dict[str, Any]:
        own = {"replica_id": sim.replica_id, "num_replicas": sim.num_replicas}
        with building:
            section = diloco_section(config) | own | {"run_dir": config.get("run_dir")}
            callback = build_one("callbacks", {"diloco": section}, manager=sim.manager)
            trainer = build_trainer(config, callback)
        return _fit(trainer, callback, config)

    try:
        return simulate(replica, num_replicas=num_replicas, timeout_s=None)
    except SimulationError as error:
        if isinstance(error.__cause__, ConfigError):
            # It is not one group's error: all were built from one config.
            raise error.__cause__ from None
        raise


@composers_errors_in_the_config()
def build_trainer(config: Mapping[str, Any], diloco: DiLoCoCallback) -> Trainer:
    """Build the Trainer of one replica group.

    Args:
        config: From ``load_config``. A relative ``save_folder`` lies in ``replica_<id>/`` below its
            ``run_dir``.
        diloco: The group's DiLoCo callback, with its id. With fixed shards that selects the shard
            of the data.

    Raises:
        ConfigError: A callable that the config names rejects a value, or Composer does.
        ValueError: The group's id selects no shard.
    """
    reproducibility.seed_all(config.get("seed", 17))  # all groups start from the same weights
    model = build_one("model", config["model"])
    optimizer = _build_optimizer(config["optimizer"], model)
    others = {k: v for k, v in (config.get("callbacks") or {}).items() if k != "diloco"}
    if config.get("autoresume"):
        # Composer demands a name, which it does not use. Without save_overwrite it would refuse to
        # write again the checkpoints that came after the one from which the group continues.
        defaults = {"run_name": "diloco", "save_overwrite": True}
        config = defaults | {key: value for key, value in config.items() if value is not None}
    return Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=build_one("scheduler", config.get("scheduler"), optimizer=optimizer),
        train_dataloader=_build_loader(config, "train_loader", diloco.options),
        eval_dataloader=_build_loader(config, "eval_loader", diloco.options),
        algorithms=build_all("algorithms", config.get("algorithms")),
        callbacks=[diloco, *build_all("callbacks", others)],
        loggers=build_all("loggers", config.get("loggers")),
        save_folder=save_folder_of(config, config.get("run_dir"), diloco.options.replica_id or 0),
        progress_bar=config.get("progress_bar", sys.stderr.isatty()),
        auto_log_hparams=False,
        **{key: config[key] for key in TRAINER_ARGUMENTS if config.get(key) is not None},
    )


def _build_optimizer(section: Mapping[str, Any], model: ComposerModel) -> Optimizer:
    (found,) = find_all("optimizer", section)
    # Not the names for all: torch would save them in every checkpoint.
    needs_names = getattr(found.partial.func, "needs_names", False)
    params = model.named_parameters() if needs_names else model.parameters()
    return found.build(params=params, named_parameters=model.named_parameters(), model=model)


def _build_loader(config: Mapping[str, Any], section: str, options: ReplicaOptions) -> Any:
    contents, is_train = config.get(section), section == "train_loader"
    if not contents:
        return None
    batch_size = None if is_train else config.get("device_eval_batch_size")
    if not batch_size:
        batch_size = config["global_train_batch_size"]
        if batch_size % dist.get_world_size():
            raise ConfigError(
                f"global_train_batch_size={batch_size} (of one replica group) is not divisible by "
                f"its {dist.get_world_size()} ranks: use a multiple of {dist.get_world_size()}"
            )
        batch_size //= dist.get_world_size()
    (found,) = find_all(section, contents)
    knows_group = found.parameters.keys() >= {"replica_rank", "num_replica_groups"}
    if is_train and not knows_group and found.partial.func is not ReplicaDataLoader:
        raise ConfigError(
            "train_loader would give every group the same samples, since it does not take "
            "replica_rank and num_replica_groups. Let our loader divide the dataset (name: "
            f"dataset, dataset: {{{TARGET}: ...}}), or name a function that takes them"
        )
    is_leased = TARGET not in contents and contents.get("shards") == "leased"
    rank, groups = 0, 1
    if is_train and knows_group and not is_leased:
        run = options if options.coordinator_addr is None else ask_for_run(options)
        groups = run.num_replicas or 1  # before the callback takes them over from the coordinator
        rank = shard_of(options.replica_id or 0, groups)
    split = {} if "split" in contents else {"split": "train" if is_train else "eval"}
    return found.build(batch_size=batch_size, replica_rank=rank, num_replica_groups=groups, **split)


def _fit(trainer: Trainer, callback: DiLoCoCallback, config: Mapping[str, Any]) -> dict[str, Any]:
    began_at = trainer.state.timestamp.batch
    try:
        with composers_errors_in_the_config(lambda: trainer.state.timestamp.batch == began_at):
            trainer.fit()
        result = callback.result | {"eval": _evaluation(trainer, callback, config)}
    finally:
        trainer.close()
    if dist.get_global_rank() == 0:
        folder = ReplicaFolder(config.get("run_dir"), callback.result["replica_id"])
        folder.write_end(result)
        folder.enter("finished")
    return result


def _evaluation(
    trainer: Trainer, callback: DiLoCoCallback, config: Mapping[str, Any]
) -> dict[str, float]:
    """What a group's result says about its last evaluation.

    For a model of bytes on our text: its bits per byte, and beside them those of a model that knows
    byte frequencies alone, of one that knows nothing, and of data parallel, if ``reference`` has it
    for this text and for as many tokens as here.
    """
    metrics = callback.result["eval"]
    if "BitsPerByte" not in metrics or not is_text(config["train_loader"]):
        return metrics
    reference, key = config.get("reference") or {}, "data_parallel_bits_per_byte"
    text = getattr(getattr(trainer.state.train_dataloader, "dataset", None), "name", None)
    tokens = trainer.state.timestamp.token.value * (callback.options.num_replicas or 1)
    here = {"text": text, "tokens": tokens}
    different = [f"{name} {here[name]}" for name in here if reference.get(name) != here[name]]
    if different and key in reference:
        log.info("No data parallel result is shown: none is known for %s", " and ".join(different))
    folder = check_text_folder(config["train_loader"].get("path"))
    return {
        "bits_per_byte": metrics["BitsPerByte"],
        **({key: float(reference[key])} if key in reference and not different else {}),
        "unigram_bits_per_byte": unigram_bits_per_byte(folder),
        "uniform_bits_per_byte": 8.0,
    }
