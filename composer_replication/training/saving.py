"""Where a group's checkpoints go. Imports neither torch nor Composer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.replica.options import ReplicaEnv
from composer_replication.training.config import ConfigError

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
