"""Builds the manager and DiLoCo from a Composer job, and checks that the job can use them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import cast

import torch
from composer import Event, State, TimeUnit
from composer.callbacks import CheckpointSaver, LoadCheckpoint
from composer.utils import dist
from torch import nn
from torchft.manager import Manager

from composer_replication.callback.trainer_watch import trainer_in_fit
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.arguments import pick
from composer_replication.diloco.fragments import persistent_buffers
from composer_replication.diloco.global_state import digest_of
from composer_replication.diloco.options import DiLoCoOptions
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.group.run_folder import last_outer_step
from composer_replication.replica.factory import backend_for, make_manager
from composer_replication.replica.manager import ReplicaManager
from composer_replication.replica.options import ManagerOptions, ReplicaOptions
from composer_replication.replica.ranks import broadcast
from composer_replication.replica.single_group import SingleGroupManager

log = logging.getLogger(__name__)


def unwrapped(state: State) -> nn.Module:
    """Return the model without its DDP wrapper."""
    return cast(nn.Module, state.model.module if state.is_model_ddp else state.model)


def own_buffers(state: State, settings: DiLoCoSettings) -> dict[str, str]:
    """Return a digest of each buffer of the model that the groups do not synchronise.

    Args:
        state: Composer's state.
        settings: The run's settings.
    """
    if settings.sync_buffers != "none":
        return {}
    buffers = persistent_buffers(unwrapped(state))
    return {name: digest_of({name: buffer})[:8] for name, buffer in buffers.items()}


def name_the_node() -> None:
    """Set NODE_RANK, so that Composer can load a checkpoint under torchrun.

    Composer's own launcher sets NODE_RANK; torchrun sets the same number as GROUP_RANK.
    """
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])


def check_parallelism(state: State) -> None:
    """Reject kinds of parallelism that are not supported.

    Raises:
        ValueError: The job uses FSDP1, whose parameters are views of flat ones.
    """
    if state.fsdp_config_version == 1:
        raise ValueError(
            "FSDP version 1: DiLoCo needs parameters that keep their names and shapes. Use FSDP2: "
            "set FSDP_VERSION=2 in the environment, or pass an FSDP2Config as "
            "parallelism_config['fsdp']"
        )


def check_loads(state: State) -> None:
    """Reject callbacks that load a checkpoint too late.

    The global parameters are those that the model holds when a fit starts. Weights that are loaded
    later would count as this group's training, and whether a checkpoint has a DiLoCo state is
    checked at AFTER_LOAD.

    Raises:
        ValueError: A ``LoadCheckpoint`` loads at a later event.
    """
    for callback in state.callbacks:
        if not isinstance(callback, LoadCheckpoint):
            continue
        in_time = [Event.INIT, Event.BEFORE_LOAD]
        if callback.load_weights_only:
            in_time.append(Event.AFTER_LOAD)
        if callback.event not in in_time:
            what = "" if callback.load_weights_only else " with load_weights_only=False"
            raise ValueError(
                f"LoadCheckpoint({callback.load_path!r}, event={callback.event.name}){what}: this "
                "is too late for DiLoCo, whose global parameters are those at the start of the "
                "fit. Use event=BEFORE_LOAD, its default, or the Trainer's load_path"
            )


def build_manager(options: ReplicaOptions, state: State) -> ReplicaManager | SingleGroupManager:
    """Connect this rank to the other groups, if there may be any; every rank of the group calls it.

    Raises:
        ValueError: See ``make_manager``, or the backend does not fit the model's device.
        ConnectionError: See ``make_manager``.
    """
    own = pick(ManagerOptions, vars(options) | {"backend": _backend(options, state)})
    return make_manager(**vars(own))


def build_diloco(
    settings: DiLoCoSettings,
    options: ReplicaOptions,
    manager: DiLoCoManager | Manager,
    state: State,
    start_refusal: str | None,
    also_synced: Collection[str] = (),
) -> DiLoCo:
    """Build DiLoCo around the job's model and optimizer.

    Args:
        settings: The run's settings.
        options: This group's options.
        manager: What ``build_manager`` returned, or a simulated manager.
        state: Composer's state.
        start_refusal: See ``DiLoCo``.
        also_synced: See ``DiLoCo``.

    Raises:
        ValueError: There is not exactly one optimizer, or ``DiLoCo`` rejects an argument.
    """
    if len(state.optimizers) != 1:
        raise ValueError(
            f"{len(state.optimizers)} optimizers: DiLoCo trains with exactly one. Pass the Trainer "
            "one optimizer over all parameters"
        )
    return DiLoCo(
        manager,
        unwrapped(state),
        state.optimizers[0],
        **vars(settings),
        **vars(pick(DiLoCoOptions, vars(options))),
        start_refusal=start_refusal,
        ranks=torch.distributed.group.WORLD if dist.get_world_size() > 1 else None,
        message_device="cpu" if _backend(options, state) == "gloo" else None,
        also_synced=also_synced,
    )


def _backend(options: ReplicaOptions, state: State) -> str:
    device = next(state.model.parameters()).device
    if options.backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend='nccl', but the model is on {device}: use 'gloo'")
    return options.backend or backend_for(device)


def start_refusal_of(options: ReplicaOptions, state: State, known_step: int = 0) -> str | None:
    """Return why a group without a checkpoint must not begin this run; None if it may.

    If the run has made outer steps already, a group with fresh parameters would become the donor of
    every group that comes back, and the run's training would be lost.

    Args:
        options: This group's options.
        state: Composer's state.
        known_step: The number of outer steps that the coordinator knows of.
    """
    is_rank_0 = dist.get_global_rank() == 0
    return broadcast(_start_refusal_of(options, state, known_step) if is_rank_0 else None)


def _start_refusal_of(options: ReplicaOptions, state: State, known_step: int) -> str | None:
    step, source = last_outer_step(options.run_dir), options.run_dir
    if known_step > step:
        step, source = known_step, "the coordinator"
    if not step:
        return None
    fix = "load a checkpoint (load_path, or autoresume: true with a save_folder)"
    latest = latest_checkpoint_of(state)
    if latest is not None and latest.exists():
        fix = f"continue from this group's last checkpoint (load_path={latest})"
    return (
        f"{source} says that this run has made {step} outer steps, and this group starts "
        f"without a checkpoint: it can join other groups, but it cannot begin the run. If no other "
        f"group is left, {fix}, or begin another run: use another run_dir, and another state "
        "folder for its coordinator"
    )


def latest_checkpoint_of(state: State) -> Path | None:
    """The link to this group's newest checkpoint, which may not exist; None if none is saved."""
    for saver in state.callbacks:
        if isinstance(saver, CheckpointSaver) and saver.latest_filename is not None:
            return Path(saver.latest_filename.format(state)).absolute()
    return None


def epochs_of(state: State) -> float:
    """After how many epochs training ends; infinite if it does not end by epochs."""
    end = state.max_duration
    return end.value if end is not None and end.unit == TimeUnit.EPOCH else math.inf


def count_in_batch(state: State, what: str) -> int:
    """Return the number of samples or tokens in the current batch, over all ranks of the group.

    Args:
        state: Composer's state, which has no DataSpec: the one of a fit is the Trainer's.
        what: ``samples`` or ``tokens``.

    Raises:
        ValueError: On all ranks, if the batch of one has no tokens.
    """
    trainer = trainer_in_fit()
    assert trainer is not None and trainer._train_data_spec is not None, "a batch is of a fit"
    own = getattr(trainer._train_data_spec, f"get_num_{what}_in_batch")(state.batch)
    counts = state.device.tensor_to_device(torch.tensor([own, int(own == 0)]))
    dist.all_reduce(counts)
    total, num_without = counts.tolist()
    if num_without and what == "tokens":
        raise ValueError(
            f"weight_by='tokens', and {num_without} of the group's {dist.get_world_size()} ranks "
            "have a batch of 0 tokens: give the loader's DataSpec a get_num_tokens_in_batch "
            "(Composer's own counts input_ids), or use weight_by='samples'"
        )
    return total


def metrics_of(state: State) -> dict[str, float]:
    """Return the metrics of the last evaluation, those that are one number.

    Args:
        state: Composer's state, right after an evaluation. The metrics then keep what they have
            computed, so that nothing is communicated between ranks.
    """
    values = {}
    for label, metrics in state.eval_metrics.items():
        for name, metric in metrics.items():
            value = metric.compute() if metric.update_called else None
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[name if label == "eval" else f"{label}/{name}"] = float(value)
    return values
