"""What the replica groups of a launch are: processes that train a config, or any command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.launch.group_process import Command, train_command
from composer_replication.training.config import ConfigError, diloco_section


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launcher has to know about the groups that it runs, and nothing of what they train.

    Attributes:
        config: What becomes the run folder's ``config.yaml``. The launcher reads ``run_dir``,
            ``autoresume`` (whether the run in that folder is continued), ``callbacks.diloco`` and,
            if there is one, ``model``.
        source: Where the settings come from, for people.
        name: A file after which the run's folder is named, unless ``run_dir`` names it.
        command: Returns the command line of a group, by the run's folder and the group's id.
        nproc: Processes in each group, for their shares of cores and GPUs. None: a command starts
            its own.
        environ: Further environment variables of the groups.
        advice: What is probably wrong with a group that never joins. Empty: nobody knows.
        start_retries: How often a group that fails before it has joined is started again.
    """

    config: dict[str, Any]
    source: str
    name: str | Path
    command: Command
    nproc: int | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    start_retries: int = 0


def config_job(config: dict[str, Any], path: str | Path, nproc: int | None = 1) -> Job:
    """Return the job of training a config in every group with ``composer-replication train``.

    Args:
        config: From ``load_config``.
        path: The file that it was read from.
        nproc: Processes in each group.
    """
    command = partial(train_command, nproc)
    return Job(config=config, source=str(path), name=path, command=command, nproc=nproc)


def check_launch(job: Job, replicas: int) -> None:
    """Reject what cannot run as several groups on one machine.

    Args:
        job: What the groups run.
        replicas: Number of replica groups.

    Raises:
        ConfigError: A setting contradicts the launch. The message names it and the fix.
    """
    nproc = 1 if job.nproc is None else job.nproc
    if replicas < 1 or nproc < 1:
        raise ConfigError(f"--replicas {replicas} --nproc {nproc}: use 1 or more of each")
    section = diloco_section(job.config)
    for key, fix in (
        ("replica_id", "launch numbers the groups"),
        ("coordinator_addr", "launch starts its own coordinator"),
        ("lighthouse_addr", "launch starts its own lighthouse; `train` joins another"),
        ("run_dir", "set run_dir at the top of the config"),
    ):
        if section.get(key) is not None:
            raise ConfigError(f"callbacks.diloco.{key}={section[key]!r}: leave it out, {fix}")
    if section.get("num_replicas") not in (None, replicas):
        raise ConfigError(
            f"callbacks.diloco.num_replicas={section['num_replicas']} but --replicas {replicas}: "
            "leave num_replicas out"
        )
    if section.get("min_replica_size", 1) > replicas:
        raise ConfigError(
            f"callbacks.diloco.min_replica_size={section['min_replica_size']} is above --replicas "
            f"{replicas}, so no sync could commit: use at most {replicas}"
        )
