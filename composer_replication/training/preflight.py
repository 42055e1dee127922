"""Checks what a group needs beside its config, before Composer is imported, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from composer_replication.diloco.arguments import pick
from composer_replication.replica.lighthouse import check_lighthouse
from composer_replication.replica.options import ReplicaEnv, ReplicaOptions
from composer_replication.replica.tls import check_tls_dir
from composer_replication.training.config import ConfigError, diloco_section
from composer_replication.training.saving import run_dir_of, save_folder_of


def check_group(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    """Check that a group can save what it is to save, and that it reaches the others.

    Args:
        config: From ``load_config``.
        environ: Environment variables. None: those of this process.

    Raises:
        ConfigError: Checkpoints are asked for, and there is no folder for them.
        ValueError: See ``check_reachable``.
        ConnectionError: See ``check_reachable``.
    """
    save_folder_of(config, run_dir_of(config, environ), 0)
    check_reachable(config, environ)


def check_reachable(config: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> None:
    """Check that a group's coordinator agrees with its config and that its lighthouse answers.

    Args:
        config: From ``load_config``.
        environ: Environment variables. None: those of this process.

    Raises:
        ConfigError: Neither the config nor the environment names a lighthouse or a coordinator,
            and the group is not to train alone.
        ValueError: The coordinator has other settings, another model or another version, or an
            address or a certificate cannot be used.
        ConnectionError: The coordinator or the lighthouse does not answer.
    """
    environ = os.environ if environ is None else environ
    section = diloco_section(config)
    if pick(ReplicaOptions, section).with_environment(environ).is_alone:
        return
    env = ReplicaEnv.from_env(environ)
    address = section.get("lighthouse_addr") or env.lighthouse_addr
    tls_dir = section.get("tls_dir") or env.tls_dir
    if tls_dir is not None:
        check_tls_dir(tls_dir)
    coordinator_addr = section.get("coordinator_addr") or env.coordinator_addr
    if coordinator_addr:
        from composer_replication.coordinator.client import CoordinatorClient

        client = CoordinatorClient(coordinator_addr, env.token, tls_dir=tls_dir)
        info = client.info()
        info.check_settings(section, coordinator_addr)
        info.check_versions()
        info.check_model(config["model"])
        replica_id = section.get("replica_id", env.replica_id)
        if replica_id is not None and environ.get("RANK", "0") == "0":  # once per group
            client.check_name_is_free(str(replica_id), info.heartbeat_timeout_s)
        client.close()
        address = address or info.lighthouse_addr
    if not address:
        raise ConfigError(
            "no lighthouse is named: set COMPOSER_REPLICATION_COORDINATOR or TORCHFT_LIGHTHOUSE to "
            "http://host:port, start the groups with `composer-replication launch`, or set "
            "callbacks.diloco.num_replicas: 1 to train alone, without a network"
        )
    check_lighthouse(address, section.get("connect_timeout", ReplicaOptions.connect_timeout))
