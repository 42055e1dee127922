"""What the replica groups of a launch run: a config or any command, and in which environment."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from composer_replication.config_file import (
    ConfigError,
    diloco_section,
    load_settings,
    read_diloco,
)
from composer_replication.group.run_folder import CONFIG, log_path
from composer_replication.launch.commands import JobOptions
from composer_replication.options import (
    COORDINATOR,
    HANG_TIMEOUT,
    HOSTNAME,
    RUN_DIR,
    ReplicaOptions,
)
from composer_replication.settings import DiLoCoSettings
from composer_replication.training import load_config
from composer_replication.util.lazy import named_extra

TRAIN = [sys.executable, "-m", "composer_replication", "train", f"{{run_dir}}/{CONFIG}"]
"""The command that trains a group from the config in the run's folder."""

# Set by torchrun or Composer's launcher.
_RANK_VARIABLES = (
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK BASE_RANK MASTER_ADDR MASTER_PORT"
).split()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launcher knows about the groups that it runs; not what they train.

    Attributes:
        config: What becomes the run folder's ``config.yaml``. The launcher reads ``run_dir``,
            ``autoresume`` (whether the run in that folder is continued) and ``callbacks.diloco``.
        source: Where the settings come from, for people.
        name: A file after which the run's folder is named, unless ``run_dir`` names it.
        command: The command line of a group, with ``{replica_id}`` and ``{run_dir}`` where they are
            to be replaced.
        nproc: How many processes of the command each group has, one for each rank. None: the
            command starts the ranks of its group itself, or it is the only one.
        is_own: Whether the command is the user's own, which may lack the callback.
    """

    config: Mapping[str, Any]
    source: str
    name: str | Path
    command: Sequence[str]
    nproc: int | None = None
    is_own: bool = False


def job_of(options: JobOptions) -> Job:
    """Return the job that a command line asks for: a config, or the command after ``--``.

    Raises:
        ConfigError: It names both or neither, or one of them cannot be used.
        MissingExtraError: It is a config, and Composer is not installed.
    """
    if not options.command:
        for_commands = ("settings", "set", "run_dir", "resume")
        given = [f"--{name}".replace("_", "-") for name in for_commands if getattr(options, name)]
        if given:
            raise ConfigError(
                f"{', '.join(given)} without a command after --: write key=value after CONFIG, or "
                "-- and the command that trains a group"
            )
        if options.config is None:
            raise ConfigError(
                "there is neither a config nor a command: give the path of a YAML file, or write "
                "-- and the command that trains a group, e.g. -- python train.py"
            )
        if not options.config.exists():
            raise ConfigError(
                f"there is no config at {options.config}: give the path of a YAML file, or write "
                "-- before a command of your own"
            )
        if find_spec("composer") is None:  # each group would say so, after seconds
            missing = ModuleNotFoundError(name="composer")
            raise named_extra("composer-replication launch of a config", missing)
        return Job(
            config=load_config(options.config, options.overrides or []),
            source=str(options.config),
            name=options.config,
            command=TRAIN,
            nproc=options.nproc or 1,
        )
    if options.config is not None:
        unset = next((each for each in options.set or () if "=" not in each), None)
        if unset is not None:
            raise ConfigError(f"--set {unset}: write --set {unset}={options.config}")
        raise ConfigError(
            f"{options.config} and a command after --: give settings for a command with --settings "
            "FILE or --set key=value"
        )
    return _command_job(options.command, options)


def _command_job(command: Sequence[str], options: JobOptions) -> Job:
    """Return the job of running a command in every group, whose script has the callback.

    The file of settings may be the one that the command reads: its ``run_dir`` is the run's folder,
    and its ``start_timeout_s`` holds for the launcher.

    Raises:
        ConfigError: There is no such command, the file cannot be used, or a setting is unknown or
            impossible.
    """
    followed = ("run_dir", "start_timeout_s")
    config, source, left_out = load_settings(options.settings, options.set or (), followed)
    section = diloco_section(config)
    run_dir = options.run_dir or section.pop("run_dir", None) or ""
    if left_out:
        source += f" (without {', '.join(left_out)}: name such options in the command)"
    check_command(command)
    return Job(
        config={
            "run_dir": str(run_dir),
            "callbacks": {"diloco": section},
            "autoresume": options.resume,
            "command": [word.replace("${", "\\${") for word in command],  # no ${...} of OmegaConf's
        },
        source=source,
        name=next((word for word in command if word.endswith((".py", ".yaml"))), command[0]),
        command=command,
        nproc=options.nproc,
        is_own=True,
    )


def check_command(command: Sequence[str] | None) -> Sequence[str]:
    """Return a command, if it can be started.

    Raises:
        ConfigError: It is empty, or its program does not exist or is not executable.
    """
    if not command or not command[0]:
        raise ConfigError("there is no command after --: write e.g. -- python train.py")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no command {command[0]!r}: give the path of an executable file, or the name "
            "of one in PATH"
        )
    # In another program's arguments, or those of a module, such a name may mean anything.
    runs_script = re.fullmatch(r"python[\d.]*|composer|torchrun", Path(command[0]).name)
    script = next((word for word in command if word.endswith(".py")), "")
    is_plain = runs_script and not {"-c", "-m"}.intersection(command) and "{" not in script
    if is_plain and not Path(script).exists():
        raise ConfigError(
            f"there is no script {script!r} here, as {' '.join(command)!r} needs it: give its path"
        )
    return command


def check_launch(job: Job, replicas: int) -> tuple[DiLoCoSettings, ReplicaOptions]:
    """Return the settings and options of a launch, or reject what is none on one machine.

    Args:
        job: What the groups run.
        replicas: Number of replica groups.

    Raises:
        ConfigError: A setting contradicts the launch. The message names it and the fix.
    """
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
    return read_diloco(section | {"num_replicas": replicas})


def group_command(
    command: Sequence[str],
    nproc: int | None,
    run_dir: Path,
    replica_id: str | int,
) -> list[str]:
    """Return the command line of one group. With more ranks than one, a launcher runs it.

    It is Composer's, or torchrun where there is no Composer.

    Args:
        command: As in ``Job``.
        nproc: See ``Job``.
        run_dir: The run's folder.
        replica_id: The group's id.
    """
    # Not str.format: arguments may have braces of their own, JSON for example.
    own = [
        word.replace("{replica_id}", str(replica_id)).replace("{run_dir}", str(run_dir))
        for word in command
    ]
    if nproc in (None, 1):
        return own
    folder = str(log_path(run_dir, replica_id).parent)
    if find_spec("composer") is None:
        others = ",".join(f"{rank}:3" for rank in range(1, nproc))  # their stdout and stderr
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--no-python",
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={nproc}",
            f"--log-dir={folder}",
            f"--redirects={others}",
            *own,
        ]
    # Composer's launcher forwards the output of rank 0. Without a file, that of the other ranks
    # would be lost.
    other_ranks = folder.replace("{", "{{").replace("}", "}}") + "/log_rank{rank}.txt"
    return [
        sys.executable,
        "-m",
        "composer.cli.launcher",
        f"--nproc={nproc}",
        f"--stdout={other_ranks}",
        f"--stderr={other_ranks}",
        "--command_mode",
        *own,
    ]


def group_environment(
    replica_id: str | int,
    run_dir: Path,
    hang_timeout_s: float,
) -> dict[str, str]:
    """The environment variables that a replica group needs on any machine.

    Args:
        replica_id: The group's id.
        run_dir: The run's folder.
        hang_timeout_s: Seconds without progress after which the group ends itself.
    """
    return {
        "REPLICA_GROUP_ID": str(replica_id),
        RUN_DIR: str(run_dir),
        HANG_TIMEOUT: f"{hang_timeout_s:g}",
        "PYTHONUNBUFFERED": "1",
    }


def environment(
    replica_id: int,
    replicas: int,
    nproc: int | None,
    coordinator: Any,
) -> dict[str, str]:
    """The environment variables of one of several replica groups on this machine.

    Args:
        replica_id: The group's id.
        replicas: Number of groups.
        nproc: Processes in each group. None: not known; each group has an equal share of the GPUs.
        coordinator: The run's coordinator.
    """
    environ = without_ranks(os.environ) | {
        "NUM_REPLICA_GROUPS": str(replicas),
        "TORCHFT_LIGHTHOUSE": coordinator.lighthouse_addr,
        COORDINATOR: coordinator.address,
    }
    environ.setdefault(HOSTNAME, "127.0.0.1")  # all groups are here: no other machine may connect
    processes = replicas * (nproc or 1)
    if processes > 1:
        # By default torch uses every core in each process, which makes all of them several times
        # slower.
        cores = len(os.sched_getaffinity(0))
        environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    gpus = visible_gpus()
    each = nproc or len(gpus) // replicas
    if each and len(gpus) >= replicas * each:
        own = gpus[replica_id * each : (replica_id + 1) * each]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environ


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the ranks of another job, which a group would take for its own."""
    return {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
