"""A command of the user's own as what the replica groups of a launch run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_replication.callback.run_folder import log_path
from composer_replication.launch.group_process import per_rank
from composer_replication.launch.job import Job
from composer_replication.training.config import ConfigError, diloco_section, read_value
from composer_replication.training.settings_file import SECTION, load_settings

START_RETRIES = 2
"""How often a command that fails before it has joined is started again.

Jobs that start at the same moment on one machine may stand in each other's way: StreamingDataset
chooses names for its shared memory that another job may take first.
"""

MISSING_CALLBACK = (
    "What trains there needs the callback: Trainer(..., callbacks=[DiLoCoCallback()]), with `from "
    "composer_replication import DiLoCoCallback`, or in a YAML for llm-foundry `callbacks: "
    "{diloco: {}}`. If it has the callback, leave coordinator_addr, lighthouse_addr and run_dir "
    "out of its arguments: they come from the environment"
)


def read_settings(path: Path | None, given: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """Read the settings of a run whose groups are started with a command.

    Args:
        path: A YAML file, see ``load_settings``. It may be the one that the command reads: its
            ``run_dir`` is the run's folder, and its ``start_timeout_s`` holds for the launcher.
        given: Settings in place of the file's, such as ``sync_every=50``.

    Returns:
        What the launcher reads of a config, and where it comes from.

    Raises:
        ConfigError: The file cannot be used, or a setting is unknown or impossible.
    """
    config, source = load_settings(path, given)
    own = {
        name: None if path is None else read_value(path, f"{SECTION}.{name}")
        for name in ("run_dir", "start_timeout_s")
    }
    diloco = diloco_section(config)
    if own["start_timeout_s"] is not None:
        diloco["start_timeout_s"] = own["start_timeout_s"]
    return {"run_dir": own["run_dir"], "callbacks": {"diloco": diloco}}, source


def command_job(
    command: Sequence[str],
    config: dict[str, Any],
    source: str,
    *,
    nproc: int | None = None,
    run_dir: str | Path | None = None,
    resumes: bool = False,
) -> Job:
    """Return the job of running a command in every group, whose script has the callback.

    Args:
        command: The command line. ``{replica_id}`` and ``{run_dir}`` in it are replaced.
        config: The settings of the run, from ``read_settings``.
        source: Where they come from.
        nproc: How many processes of the command each group has, one for each rank. None: the
            command starts the ranks of its group itself, or it is the only one.
        run_dir: The run's folder. None: that of the config, else a new one below ``runs``.
        resumes: Whether the run in that folder is continued.

    Raises:
        ConfigError: There is no such command.
    """
    check_command(command)
    run_dir = run_dir or config["run_dir"]
    own = {
        "run_dir": None if run_dir is None else str(run_dir),
        "autoresume": resumes,
        "command": [word.replace("${", "\\${") for word in command],  # no ${...} of OmegaConf's
    }
    return Job(
        config=config | own,
        source=source,
        name=next((word for word in command if word.endswith((".py", ".yaml"))), command[0]),
        command=partial(group_command, command, nproc),
        nproc=nproc,
        advice=MISSING_CALLBACK,
        start_retries=START_RETRIES,
    )


def check_command(command: Sequence[str]) -> None:
    """Reject a command that cannot be started.

    Raises:
        ConfigError: It is empty, or its program does not exist or is not executable.
    """
    if not command:
        raise ConfigError("there is no command after --: write e.g. -- python train.py")
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"there is no command {command[0]!r}: give the path of an executable file, or the name "
            "of one in PATH"
        )


def group_command(
    command: Sequence[str], nproc: int | None, run_dir: Path, replica_id: str | int
) -> list[str]:
    """Return the command line of one group.

    Args:
        command: The user's, with ``{replica_id}`` and ``{run_dir}`` where they are to be replaced.
        nproc: See ``command_job``.
        run_dir: The run's folder.
        replica_id: The group's id.
    """
    # Not str.format: arguments may have braces of their own, JSON for example.
    own = [
        word.replace("{replica_id}", str(replica_id)).replace("{run_dir}", str(run_dir))
        for word in command
    ]
    return per_rank(own, nproc, log_path(run_dir, replica_id).parent)
