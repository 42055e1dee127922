"""What a group needs beside its config: folders for its checkpoints, and the others' addresses.

It is checked before Composer is imported, which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.arguments import among
from composer_replication.options import (
    OptionKeywords,
    ReplicaEnv,
    ReplicaOptions,
    replica_id_of,
)
from composer_replication.replica.lighthouse import check_lighthouse
from composer_replication.training.config import ConfigError, diloco_section

CHECKPOINTS = "checkpoints"
"""The ``save_folder`` of a config that names a ``save_interval`` alone."""


def run_dir_of(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> str | None:
    """Return the run's folder: the environment's, else the config's; None if neither names one.

    Args:
        config: From ``load_config``.
        environ: Environment variables. None: those of this process.
    """
    return ReplicaEnv.from_env(environ).run_dir or config.get("run_dir")


def save_folder_of(
    config: Mapping[str, Any], run_dir: str | None, replica_id: str | int
) -> str | None:
    """Return the folder for a group's checkpoints; None if the config asks for none.

    Each group has one of its own: in a common folder the groups would overwrite files.

    Args:
        config: From ``load_config``.
        run_dir: The run's folder. A relative ``save_folder`` lies in ``replica_<id>/`` below it.
        replica_id: The group's id.

    Raises:
        ConfigError: The config says how often to save, and no folder is named to save in. Composer
            would save nothing, and would not say so.
    """
    save_folder, interval = config.get("save_folder"), config.get("save_interval")
    if save_folder is None:
        if interval is None:
            return None
        if run_dir is None:
            raise ConfigError(
                f"save_interval={interval!r} without save_folder and without a run folder: no "
                "checkpoint would be saved. Set save_folder=..., or set run_dir=...: then they "
                f"are saved in <run_dir>/replica_{replica_id}/{CHECKPOINTS}"
            )
        save_folder = CHECKPOINTS
    group = f"replica_{replica_id}"
    if "://" in save_folder or Path(save_folder).is_absolute() or run_dir is None:
        return f"{save_folder.rstrip('/')}/{group}"
    return str(Path(run_dir) / group / save_folder)


def check_device(config: Mapping[str, Any]) -> None:
    """Check that this machine has a GPU, if the config asks for one.

    Raises:
        ConfigError: It has none that torch can use.
    """
    if config.get("device") != "gpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "device='gpu', and torch finds no GPU on this machine: write device: cpu, or leave "
            "device out; `composer-replication doctor` says what is here"
        )


def check_group(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    """Check that a group can save what it is to save, and that it reaches the others.

    Args:
        config: From ``load_config``.
        environ: Environment variables. None: those of this process.

    Raises:
        ConfigError: Checkpoints are asked for, and there is no folder for them; there is no GPU; or
            neither the config nor the environment names a lighthouse or a coordinator, and the
            group is not to train alone.
        ValueError: The coordinator has other settings, another model or another version, or an
            address cannot be used.
        ConnectionError: The coordinator or the lighthouse does not answer.
    """
    environ = os.environ if environ is None else environ
    save_folder_of(config, run_dir_of(config, environ), 0)
    check_device(config)
    section = diloco_section(config)
    options = ReplicaOptions(**among(section, OptionKeywords)).with_environment(environ)
    coordinator_addr = options.coordinator_addr
    if (config.get("train_loader") or {}).get("shards") == "leased" and coordinator_addr is None:
        raise ConfigError(
            "train_loader.shards='leased' needs a coordinator, which hands out the samples: use "
            "`composer-replication launch CONFIG`, or shards: fixed"
        )
    if options.is_alone:
        return
    if coordinator_addr:
        from composer_replication.coordinator.client import CoordinatorClient

        client = CoordinatorClient(coordinator_addr, ReplicaEnv.from_env(environ).token)
        info = client.info()
        options = info.adopt(options, section)
        info.check_model(config["model"])
        if options.replica_id is not None and environ.get("RANK", "0") == "0":  # once per group
            client.check_name_is_free(str(options.replica_id), info.heartbeat_timeout_s)
        client.close()
    if not options.lighthouse_addr:
        raise ConfigError(
            "callbacks.diloco.lighthouse_addr=None: set COMPOSER_REPLICATION_COORDINATOR or "
            "TORCHFT_LIGHTHOUSE to http://host:port, start the groups with `composer-replication "
            "launch CONFIG --replicas 2`, or train alone with callbacks.diloco.num_replicas=1"
        )
    check_lighthouse(options.lighthouse_addr)
    replica_id_of(options)
