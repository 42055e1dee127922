"""The command ``simulate``: trains the groups of a run in one process."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from composer_replication.callback.run_folder import CONFIG, make_run_folder
from composer_replication.diloco.arguments import pick
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.launch.display import Display, print_settings
from composer_replication.launch.outcome import finish
from composer_replication.training.config import diloco_section, save_config


def simulate_groups(config: dict[str, Any], config_path: Path, replicas: int) -> int:
    """Train replica groups as threads, and print the result.

    Args:
        config: From ``load_config``.
        config_path: The file that it was read from.
        replicas: How many groups.

    Returns:
        An exit status.
    """
    run_dir = make_run_folder(config, config_path)
    config["run_dir"] = str(run_dir)
    save_config(config, run_dir / CONFIG)
    began = time.monotonic()
    # Imported here: it takes seconds, and a run folder that is in use should be an error before.
    from composer_replication.training.trainer import simulate_replicas

    # The display shows one table for all groups. Their log lines would be drawn over it.
    logging.getLogger("composer_replication").setLevel(logging.WARNING)
    console = Console(highlight=False)
    print_settings(console, pick(DiLoCoSettings, diloco_section(config)), str(config_path))
    with Display(console, run_dir, replicas).follow():
        simulate_replicas(config, replicas)
    return finish(run_dir, range(replicas), time.monotonic() - began, restarts={})
