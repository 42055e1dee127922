"""What a replica group takes from the Composer job that it is: ranks, model, folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import cast

import torch
from composer import Event, State
from composer.callbacks import CheckpointSaver, LoadCheckpoint
from composer.core import DataSpec
from composer.utils import dist
from torch import nn
from torchft.manager import Manager

from composer_replication.callback.checkpoint_files import newest_whole
from composer_replication.callback.run_folder import last_outer_step
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.arguments import pick
from composer_replication.diloco.options import DiLoCoOptions
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.torchft_api import DiLoCoManager
from composer_replication.replica.factory import backend_for, make_manager
from composer_replication.replica.lighthouse import read_status
from composer_replication.replica.manager import ReplicaManager
from composer_replication.replica.options import ManagerOptions, ReplicaOptions, lighthouse_of
from composer_replication.replica.process_group import host_store
from composer_replication.replica.ranks import broadcast

log = logging.getLogger(__name__)


def unwrapped(state: State) -> nn.Module:
    """The model without DDP around it."""
    return cast(nn.Module, state.model.module if state.is_model_ddp else state.model)


def name_the_node() -> None:
    """Let Composer load a checkpoint under torchrun.

    It asks for NODE_RANK, which Composer's own launcher sets; torchrun's name for it is GROUP_RANK.
    """
    if "GROUP_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["GROUP_RANK"])


def check_parallelism(state: State) -> None:
    """Refuse what no test of ours covers.

    Raises:
        ValueError: FSDP1, whose parameters are views of flat ones.
    """
    if state.fsdp_config_version == 1:
        raise ValueError(
            "FSDP version 1: DiLoCo needs parameters that keep their names and shapes. Use FSDP2: "
            "set FSDP_VERSION=2 in the environment, or pass an FSDP2Config as "
            "parallelism_config['fsdp']"
        )


def check_loads(state: State) -> None:
    """Refuse checkpoints that callbacks load too late.

    The global parameters are what the model holds when a fit starts. Weights that come later would
    count as what this group has learnt since; and whether a checkpoint has a DiLoCo state is asked
    at AFTER_LOAD.

    Raises:
        ValueError: There is such a callback.
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


def build_manager(options: ReplicaOptions, state: State) -> ReplicaManager:
    """Connect this rank to the other groups; every rank of the group calls it.

    Raises:
        ValueError: No lighthouse is named.
        ConnectionError: See ``make_manager``.
    """
    lighthouse_of(options)  # an error here is no wait for another rank's store
    store = host_store(options.hostname) if dist.get_global_rank() == 0 else None
    host, port = broadcast((store.host, store.port) if store else None)
    own = pick(ManagerOptions, vars(options) | {"backend": _backend(options, state)})
    manager = make_manager(
        **vars(own),
        rank=dist.get_global_rank(),
        world_size=dist.get_world_size(),
        store_addr=host,
        store_port=port,
    )
    manager.store = store
    return manager


def build_diloco(
    settings: DiLoCoSettings,
    options: ReplicaOptions,
    manager: DiLoCoManager | Manager,
    state: State,
    must_not_start: str | None,
    also_synced: Collection[str] = (),
) -> DiLoCo:
    """Build DiLoCo around the job's model and optimizer; for the last arguments see there.

    Raises:
        ValueError: There is not exactly one optimizer, or see ``DiLoCo``.
    """
    if len(state.optimizers) != 1:
        raise ValueError(f"{len(state.optimizers)} optimizers: DiLoCo trains with exactly one")
    return DiLoCo(
        manager,
        unwrapped(state),
        state.optimizers[0],
        **vars(settings),
        **vars(pick(DiLoCoOptions, vars(options))),
        must_not_start=must_not_start,
        ranks=torch.distributed.group.WORLD if dist.get_world_size() > 1 else None,
        message_device="cpu" if _backend(options, state) == "gloo" else None,
        also_synced=also_synced,
    )


def _backend(options: ReplicaOptions, state: State) -> str:
    device = next(state.model.parameters()).device
    if options.backend == "nccl" and device.type != "cuda":
        raise ValueError(f"backend='nccl' and the model is on {device}: use 'gloo'")
    return options.backend or backend_for(device)


def why_not_start(options: ReplicaOptions, state: State, known_step: int = 0) -> str | None:
    """Why a group that continues from nothing must not begin this run; None if it may.

    If the run has made outer steps already, a group with fresh parameters would become the donor
    of all that come back, and wipe out what the run has learnt.

    Args:
        options: Of this group.
        state: Composer's.
        known_step: How many the coordinator knows of.
    """
    is_rank_0 = dist.get_global_rank() == 0
    return broadcast(_why_not_start(options, state, known_step) if is_rank_0 else None)


def _why_not_start(options: ReplicaOptions, state: State, known_step: int) -> str | None:
    step, who = last_outer_step(options.run_dir), options.run_dir
    if known_step > step:
        step, who = known_step, "the coordinator"
    if not step:
        _warn_of_earlier_quorums(options)
        return None
    fix = "load a checkpoint (load_path, or autoresume: true with a save_folder)"
    for saver in state.callbacks:
        if isinstance(saver, CheckpointSaver) and saver.latest_filename is not None:
            newest = newest_whole(Path(saver.latest_filename.format(state)).parent)
            if newest is not None:
                fix = f"continue from this group's last checkpoint (load_path={newest})"
    return (
        f"{who} says that this run has made {step} outer steps, and this group starts "
        f"without a checkpoint: it takes over what others hold and begins nothing anew. If there "
        f"is nobody, {fix}, or begin another run: another run_dir, and another state folder of its "
        "coordinator"
    )


def _warn_of_earlier_quorums(options: ReplicaOptions) -> None:
    if options.lighthouse_addr is None:
        return
    members = read_status(options.lighthouse_addr, options.connect_timeout).members
    step = max((member.step for member in members), default=0)
    if step:
        # Only a warning: a lighthouse may well outlive a run and serve the next.
        log.warning(
            "The lighthouse's last quorum had made %d steps, and this group starts without a "
            "checkpoint. If that was this run and nobody of it is left, stop this group and "
            "continue from a checkpoint: load_path, or autoresume: true",
            step,
        )


def samples_in_batch(state: State) -> int:
    """Samples of the current batch, over all ranks of the group."""
    # The default count, of tensors, lists and dicts: the state does not have the loader's own.
    own = DataSpec([]).get_num_samples_in_batch(state.batch)
    total = state.device.tensor_to_device(torch.tensor([own]))
    dist.all_reduce(total)
    return int(total.item())
