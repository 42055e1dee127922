"""Run a Composer training job as one DiLoCo replica group."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from composer import Callback, Logger, State
from composer.core import DataSpec
from composer.utils import dist
from torch import nn
from torchft.manager import Manager

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.handover import Handover
from composer_replication.options import ReplicaOptions
from composer_replication.process_group import host_store
from composer_replication.progress import Progress, max_batches
from composer_replication.replica import backend_for, make_manager
from composer_replication.replica_manager import ReplicaManager
from composer_replication.run_folder import ReplicaFolder
from composer_replication.stopping import expect_end, watch_for_stops

log = logging.getLogger(__name__)
package_log = logging.getLogger("composer_replication")


class DiLoCoCallback(Callback):
    """Make a Composer ``Trainer`` one replica group of a DiLoCo run.

    Each group is a Composer job of its own, under plain ``python``, ``composer -n N`` or
    ``torchrun``. The arguments are those of :class:`DiLoCoSettings`, equal in all groups, and of
    :class:`ReplicaOptions`, which may differ; both document them. ``replica_id``,
    ``num_replicas``, ``lighthouse_addr`` and ``run_dir`` come from the environment if not given.

    Example:
        .. code-block:: yaml

            callbacks:
              diloco:
                sync_every: 100
                num_fragments: 2
                fragment_sync_delay: 5
                fragment_update_alpha: 0.5

    Logs at every committed sync:

    +-----------------------------------+-----------------------------------------------------+
    | Key                               | Value                                               |
    +===================================+=====================================================+
    | ``diloco/outer_step``             | outer steps committed so far                        |
    | ``diloco/fragment``               | which fragment was synchronised, from 0             |
    | ``diloco/num_participants``       | groups in the quorum                                |
    | ``diloco/contribution``           | this group's weight in the mean                     |
    | ``diloco/total_contribution``     | the sum of all weights                              |
    | ``diloco/sync_seconds``           | how long training stood still for it                |
    | ``diloco/wait_seconds``           | of that, the wait for the quorum                    |
    | ``diloco/compute_fraction``       | of the time since the last sync, the part training  |
    | ``diloco/bytes_sent``             | size of this rank's messages                        |
    | ``diloco/pseudo_gradient_norm``   | L2 norm of this group's pseudo-gradient             |
    | ``diloco/outer_momentum_norm``    | L2 norm of the fragment's outer momentum            |
    | ``diloco/steps_lost``             | inner steps thrown away, by a heal or not finite    |
    | ``diloco/retries``                | attempts that did not commit                        |
    | ``diloco/healed``                 | 1 if the group took over the global state in it     |
    | ``diloco/global_digest``          | SHA-256 of the global parameters (run folder only)  |
    +-----------------------------------+-----------------------------------------------------+

    Args:
        manager: Use this manager instead of building one: for simulations. Not for YAML.
    """

    def __init__(
        self,
        *,
        sync_every: int = DiLoCoSettings.sync_every,
        num_fragments: int = DiLoCoSettings.num_fragments,
        fragment_patterns: Sequence[str | Sequence[str]] | None = None,
        fragment_sync_delay: int = DiLoCoSettings.fragment_sync_delay,
        fragment_update_alpha: float = DiLoCoSettings.fragment_update_alpha,
        outer_lr: float = DiLoCoSettings.outer_lr,
        outer_momentum: float = DiLoCoSettings.outer_momentum,
        outer_nesterov: bool = DiLoCoSettings.outer_nesterov,
        weight_by: str = DiLoCoSettings.weight_by,
        bucket_cap_mb: float = DiLoCoSettings.bucket_cap_mb,
        max_sync_retries: int = DiLoCoSettings.max_sync_retries,
        replica_id: str | int | None = None,
        num_replicas: int | None = None,
        lighthouse_addr: str | None = None,
        min_replica_size: int = ReplicaOptions.min_replica_size,
        start_timeout_s: float = ReplicaOptions.start_timeout_s,
        on_start_timeout: str = ReplicaOptions.on_start_timeout,
        timeout: float = ReplicaOptions.timeout,
        quorum_timeout: float = ReplicaOptions.quorum_timeout,
        connect_timeout: float = ReplicaOptions.connect_timeout,
        quorum_retries: int = ReplicaOptions.quorum_retries,
        give_up_after_s: float | None = ReplicaOptions.give_up_after_s,
        hostname: str | None = None,
        backup_device: str | None = None,
        pin_memory: bool = ReplicaOptions.pin_memory,
        final_sync: bool = ReplicaOptions.final_sync,
        heal_inner_state: str = ReplicaOptions.heal_inner_state,
        digest_every: int = ReplicaOptions.digest_every,
        run_dir: str | None = None,
        manager: Any = None,
    ) -> None:
        self.settings = DiLoCoSettings(
            sync_every=sync_every,
            num_fragments=num_fragments,
            fragment_patterns=fragment_patterns,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_nesterov=outer_nesterov,
            weight_by=weight_by,
            bucket_cap_mb=bucket_cap_mb,
            max_sync_retries=max_sync_retries,
        )
        self.options = ReplicaOptions(
            replica_id=replica_id,
            num_replicas=num_replicas,
            lighthouse_addr=lighthouse_addr,
            min_replica_size=min_replica_size,
            start_timeout_s=start_timeout_s,
            on_start_timeout=on_start_timeout,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            connect_timeout=connect_timeout,
            quorum_retries=quorum_retries,
            give_up_after_s=give_up_after_s,
            hostname=hostname,
            backup_device=backup_device,
            pin_memory=pin_memory,
            final_sync=final_sync,
            heal_inner_state=heal_inner_state,
            digest_every=digest_every,
            run_dir=run_dir,
        ).with_environment()
        if package_log.level == logging.NOTSET:
            package_log.setLevel(logging.INFO)  # llm-foundry lets only its own packages speak
        self.diloco: DiLoCo | None = None
        self.result: dict[str, Any] = {}
        self._given_manager = manager
        self._manager: Any = None
        self._kept: dict[str, Any] | None = None
        self._handover: Handover | None = None
        self._parent = os.getppid()
        self._folder = ReplicaFolder(None, "")
        self._progress = Progress(self._folder, sync_every)

    # ---- Composer's events, in the order in which they come ---------------------------------

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Composer loads checkpoints before fit_start: keep it until there is something to load.
        self._kept = state or None

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.diloco is not None:
            return
        watch_for_stops()
        run_dir = self.options.run_dir if dist.get_global_rank() == 0 else None
        self._folder = ReplicaFolder(run_dir, self._replica_id)
        self._progress = Progress(self._folder, self.settings.sync_every)
        self._manager = self._given_manager or self._build_manager(state)
        try:
            self.diloco = self._build_diloco(state)
            if self._kept is not None:  # from a checkpoint, or from the fit() before
                self.diloco.load_state_dict(self._kept)
            self.diloco.counts_steps = False
            self._progress.tell_phase("joining", state, self.diloco)
            self.diloco.__enter__()
        except BaseException:
            self._leave()  # no heartbeat of ours may hold the others up
            raise
        self._tell("training", state, logger)

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        # Only steps inside a batch count: torch's get_optimizer_state_dict and
        # set_optimizer_state_dict make hidden ones, at a load and, for SGD, at every save.
        self.diloco.counts_steps = True
        if max_batches(state) == state.timestamp.batch.value + 1:
            self.diloco.expect_last_step()
        if self.settings.weight_by == "samples":
            self.diloco.count_samples(_samples_in_batch(state))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        self.diloco.counts_steps = False
        self._check_launcher()
        self._progress.count_batch(state)
        if self._tell("training", state, logger) and self._is_asked_to_stop():
            log.info(
                "Ending after outer step %d: the run's folder says STOP", self.diloco.outer_step
            )
            state.stop_training()

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        if self.options.final_sync:
            self.diloco.final_sync()
        self._tell("evaluating", state, logger)
        self.result = {
            "replica_id": self._replica_id,
            "inner_steps": self.diloco.inner_steps,
            "outer_steps": self.diloco.outer_step,
            "global_digest": self.diloco.global_digest(),
            "final_loss": self._progress.final_loss,
            "eval": {},
        }
        self._folder.write_result(self.result)
        self._kept = self.diloco.state_dict()
        self._leave()

    def close(self, state: State, logger: Logger) -> None:
        if self.diloco is not None:  # after an exception, since fit_end has not come
            expect_end(status=1)  # Composer's barrier comes next, and the other ranks may not
        self._leave()

    def state_dict(self) -> dict[str, Any]:
        if self.diloco is not None:
            return self.diloco.state_dict()
        return self._kept or {}

    def _tell(self, phase: str, state: State, logger: Logger) -> bool:
        """Tell of what has happened. True if there was a sync."""
        assert self.diloco is not None
        reports = self.diloco.pop_finished_syncs()
        if self._handover is not None and any(report.healed for report in reports):
            self._handover.take_inner_state()
        self._progress.tell_syncs(reports, state, logger)
        self._progress.tell_phase(phase, state, self.diloco)
        return bool(reports)

    def _check_launcher(self) -> None:
        """A rank that outlives its launcher would go on voting beside the group started anew.

        Raises:
            RuntimeError: The launcher has died.
        """
        if dist.get_world_size() > 1 and os.getppid() != self._parent:
            raise RuntimeError(
                "the launcher of this group's ranks has died, so this rank ends. Start the group "
                "again: it takes over what the others have"
            )

    def _is_in_batch(self) -> bool:
        return self.diloco is not None and self.diloco.counts_steps

    def _is_asked_to_stop(self) -> bool:
        """Whether rank 0 has found ``STOP`` in the run's folder; every rank hears it."""
        asked = [self._folder.asks_to_stop]
        dist.broadcast_object_list(asked, src=0)
        return asked[0]

    # ---- building ---------------------------------------------------------------------------

    @property
    def _replica_id(self) -> str:
        if self.options.replica_id is None:
            raise ValueError(
                "this replica group has no name: set REPLICA_GROUP_ID=0, 1, ... in the environment "
                "of each group, or callbacks.diloco.replica_id"
            )
        return str(self.options.replica_id)

    def _build_manager(self, state: State) -> ReplicaManager:
        options = self.options
        if options.lighthouse_addr is None:
            raise ValueError(
                "no lighthouse is named: set TORCHFT_LIGHTHOUSE=http://host:port or "
                "callbacks.diloco.lighthouse_addr, or use `composer-replication launch`"
            )
        store = host_store(options.hostname) if dist.get_global_rank() == 0 else None
        address = [(store.host, store.port) if store else None]
        dist.broadcast_object_list(address, src=0)
        assert address[0] is not None, "rank 0 hosts the store"
        manager = make_manager(
            replica_id=self._replica_id,
            lighthouse_addr=options.lighthouse_addr,
            min_replica_size=options.min_replica_size,
            timeout=options.timeout,
            quorum_timeout=options.quorum_timeout,
            connect_timeout=options.connect_timeout,
            quorum_retries=options.quorum_retries,
            give_up_after_s=options.give_up_after_s,
            rank=dist.get_global_rank(),
            world_size=dist.get_world_size(),
            store_addr=address[0][0],
            store_port=address[0][1],
            hostname=options.hostname,
            backend=backend_for(next(state.model.parameters()).device),
        )
        manager.store = store
        return manager

    def _build_diloco(self, state: State) -> DiLoCo:
        if len(state.optimizers) != 1:
            raise ValueError(f"{len(state.optimizers)} optimizers: DiLoCo trains with exactly one")
        settings = self.settings
        self._handover = Handover(state, self.options.heal_inner_state, self._is_in_batch)
        self._manager.register_state_dict_fn("composer", self._handover.take, self._handover.give)
        return DiLoCo(
            cast(Manager, self._manager),
            cast(nn.Module, state.model.module if state.is_model_ddp else state.model),
            state.optimizers[0],
            nesterov_sgd(settings.outer_lr, settings.outer_momentum, settings.outer_nesterov),
            settings.sync_every,
            num_fragments=settings.num_fragments,
            fragment_patterns=settings.fragment_patterns,
            fragment_sync_delay=settings.fragment_sync_delay,
            fragment_update_alpha=settings.fragment_update_alpha,
            weight_by=settings.weight_by,
            bucket_cap_mb=settings.bucket_cap_mb,
            max_sync_retries=settings.max_sync_retries,
            backup_device=self.options.backup_device,
            pin_memory=self.options.pin_memory,
            num_replicas=self.options.num_replicas or 1,
            start_timeout_s=self.options.start_timeout_s,
            on_start_timeout=self.options.on_start_timeout,
            give_up_after_s=self.options.give_up_after_s,
            digest_every=self.options.digest_every,
        )

    def _leave(self) -> None:
        if self.diloco is not None:
            self.diloco.__exit__(None, None, None)
            self.diloco = None
        self._shut_down()

    def _shut_down(self) -> None:
        """Stop the heartbeats before the last evaluation: the others would wait for this group."""
        if self._manager is not None:
            self._manager.shutdown()
            self._manager = None


def _samples_in_batch(state: State) -> int:
    """Samples of the current batch, over all ranks of the group."""
    # The default count, of tensors, lists and dicts: the state does not have the loader's own.
    own = DataSpec([]).get_num_samples_in_batch(state.batch)
    total = state.device.tensor_to_device(torch.tensor([own]))
    dist.all_reduce(total)
    return int(total.item())
