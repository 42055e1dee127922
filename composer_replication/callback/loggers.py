"""Puts what Composer's loggers record of the groups of a run side by side, by the run's id.

Composer's loggers open their run at ``INIT``, before any callback has its turn and before the
coordinator can be asked. So a run is renamed once it is open, and before anything is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from composer import Logger, State
from composer.loggers import MLFlowLogger, TensorboardLogger, WandBLogger

from composer_replication.replica.options import ReplicaOptions, replica_id_of

log = logging.getLogger(__name__)


def name_runs(state: State, logger: Logger, options: ReplicaOptions) -> None:
    """Give the runs of a group's loggers the run's id as group, and the group's name.

    A name or a group that the script gave a logger stays. A group that trains alone stays as it is.

    Args:
        state: Composer's state.
        logger: Composer's logger.
        options: Of this group, with what the coordinator says.
    """
    known = [
        (each, rename)
        for each in logger.destinations
        for kind, rename in _KINDS.items()
        if isinstance(each, kind)
    ]
    if not known or options.is_alone:
        return
    run_id = options.run_id_or_folder
    if run_id is None:
        log.warning(
            "%s cannot put the groups of this run side by side, since the run has no id: set "
            "COMPOSER_REPLICATION_RUN_ID to the same name in all groups",
            " and ".join(type(each).__name__ for each, _ in known),
        )
        return
    name = f"replica_{replica_id_of(options)}"
    for destination, rename in known:
        rename(destination, run_id, name, state.run_name)


def _rename_wandb(destination: WandBLogger, run_id: str, name: str, run_name: str) -> None:
    import wandb

    run = wandb.run
    if run is None or run.disabled:  # another rank than 0, or mode="disabled"
        return
    # W&B sends the settings again whenever a name is set. The group and the kind have no setter of
    # their own.
    settings = run._settings
    if run.group in ("", run_name):  # Composer's own default, where all ranks log
        settings.run_group = run_id
    settings.run_job_type = run.job_type or name
    run.name = _renamed(run.name, name, run_name)


def _rename_mlflow(destination: MLFlowLogger, run_id: str, name: str, run_name: str) -> None:
    import mlflow

    run = mlflow.active_run()
    if run is None:  # another rank than 0
        return
    destination.run_name = _renamed(destination.run_name, name, run_name)
    mlflow.MlflowClient().update_run(run.info.run_id, name=destination.run_name)
    if destination.run_group is None:
        destination.run_group = run_id
        mlflow.set_tag("run_group", run_id)


def _rename_tensorboard(
    destination: TensorboardLogger, run_id: str, name: str, run_name: str
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = destination.writer
    assert writer is not None and writer.file_writer is not None, "opened at INIT"
    assert destination.log_dir is not None, "chosen at INIT"
    empty = Path(writer.file_writer.event_writer._file_name)  # as Composer does to upload it
    writer.close()
    empty.unlink()
    if not any(empty.parent.iterdir()):
        empty.parent.rmdir()
    destination.run_name = name
    folder = Path(destination.log_dir) / run_id / name
    destination.writer = SummaryWriter(log_dir=folder, flush_secs=writer.flush_secs)


def _renamed(current: str | None, name: str, run_name: str) -> str:
    """The name that a run gets: its own if the script gave it one.

    Args:
        current: Its name now.
        name: The group's name.
        run_name: The Trainer's, which is Composer's default for a logger's run.
    """
    if current is None or not current.startswith(run_name):
        return current or name
    return name + current.removeprefix(run_name)  # which may have the rank at its end


_KINDS: dict[type, Callable[[Any, str, str, str], None]] = {
    WandBLogger: _rename_wandb,
    MLFlowLogger: _rename_mlflow,
    TensorboardLogger: _rename_tensorboard,
}
