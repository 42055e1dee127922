"""Puts numbers where a config of a run on this machine says ``auto``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer_replication.callback.run_folder import CONFIG, last_outer_step
from composer_replication.diloco.outer_table import auto_names, resolve
from composer_replication.launch.coordinator_command import settings_of
from composer_replication.training.config import diloco_section, read_value


def with_numbers(
    config: dict[str, Any], run_dir: Path, replicas: int
) -> tuple[dict[str, Any], str]:
    """Return a config without ``auto``: a run that goes on keeps the numbers that it began with.

    Args:
        config: From ``load_config``.
        run_dir: The run's folder. Its config is that of the run's start so far, if it has begun.
        replicas: How many groups the run begins with.

    Returns:
        The config, and a line that says what ``auto`` has become; empty if it has no ``auto``.
    """
    settings = settings_of(config)
    names = auto_names(settings)
    begun_with = None
    if names and last_outer_step(run_dir):
        read = {name: read_value(run_dir / CONFIG, f"callbacks.diloco.{name}") for name in names}
        defaults = type(settings)()
        begun_with = {
            name: getattr(defaults, name) if value is None else value
            for name, value in read.items()
        }
    settings, line = resolve(settings, replicas, begun_with)
    if not line:
        return config, line
    section = diloco_section(config) | {name: getattr(settings, name) for name in names}
    return config | {"callbacks": config["callbacks"] | {"diloco": section}}, line
