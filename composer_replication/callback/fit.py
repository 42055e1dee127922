"""A replica group's part in a run during one ``Trainer.fit``: it joins, reports and leaves."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from typing import Any

from composer import Logger, State
from composer.utils import dist

from composer_replication.callback.composer_job import (
    build_diloco,
    build_manager,
    epochs_of,
    start_refusal_of,
    unwrapped,
)
from composer_replication.callback.console import Console
from composer_replication.callback.group_state import GroupState
from composer_replication.callback.heal_state import HealState
from composer_replication.callback.progress import SyncLog, max_batches
from composer_replication.callback.trainer_watch import when_fit_is_over
from composer_replication.coordinator.client import RunInfo
from composer_replication.coordinator.membership import Membership
from composer_replication.data.group_data import group_data_of
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.fragments import synced_tensors
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.group.run_folder import WARNING, ReplicaFolder
from composer_replication.replica.options import ReplicaOptions, replica_id_of

log = logging.getLogger(__name__)


class Fit:
    """What a replica group has from the start of a fit until it leaves the others.

    Args:
        group: The group's state, which outlives the fit.
        settings: The run's settings.
        options: This group's options.
        run: What the coordinator says about the run, if there is one.

    Attributes:
        folder: Where this group writes how it is doing.
        sync_log: Logs its syncs.
        console: Says on the console how the run goes.
        manager: Connects it with the other groups, until it leaves.
    """

    def __init__(
        self,
        group: GroupState,
        settings: DiLoCoSettings,
        options: ReplicaOptions,
        run: RunInfo | None,
    ) -> None:
        self._group, self._settings, self._options, self._run = group, settings, options, run
        run_dir = options.run_dir if dist.get_global_rank() == 0 else None
        self.folder = ReplicaFolder(run_dir, replica_id_of(options))
        self.sync_log = SyncLog(self.folder, settings)
        self.console = Console(options)
        self.manager: Any = None
        self._membership: Membership | None = None
        self._heal_state: HealState | None = None
        self._leaving = threading.RLock()  # when a fit has failed, another thread leaves

    def connect(self, manager: Any, state: State, logger: Logger) -> DiLoCo:
        """Connect with the coordinator and the other groups, and build DiLoCo on that.

        Args:
            manager: The one to use. None: build one.
            state: Composer's state.
            logger: Composer's logger.
        """
        self._log_settings()
        self._warn_of_settings(state)
        also_synced, averages = self._group.also_synced, self._group.averages
        assert averages is not None, "the state has been restored"
        known_step = self._run.outer_step if self._run is not None else 0
        is_new = self._group.is_new
        refusal = start_refusal_of(self._options, state, known_step) if is_new else None
        synced = synced_tensors(unwrapped(state), self._settings, also_synced)
        if self._run is not None:
            ranks = dist.get_world_size()
            self._membership = Membership(self._options, self._run, synced, ranks)
        self.manager = manager or build_manager(self._options, state)
        self._heal_state = HealState(state, self._is_in_batch, averages)
        save, load = self._heal_state.state_dict, self._heal_state.load_state_dict
        self.manager.register_state_dict_fn("composer", load, save)
        diloco = build_diloco(
            self._settings, self._options, self.manager, state, refusal, also_synced
        )
        sync_idle = functools.partial(self._sync_idle, state, logger)
        data = group_data_of(
            state.train_dataloader,
            self._options,
            diloco,
            self._membership,
            sync_idle,
            epochs_of(state),
        )
        self._group.begin(state, diloco, data)
        return diloco

    def _log_settings(self) -> None:
        if dist.get_global_rank() == 0:
            source = "Settings"
            if self._run is not None:
                source = f"The coordinator's settings ({self._run.settings_source})"
            log.info("%s: %s", source, self._settings)

    def _warn_of_settings(self, state: State) -> None:
        momentum = self._settings.momentum_warning(max_batches(state, is_bound=True))
        if momentum and dist.get_global_rank() == 0:
            log.warning("%s", momentum)
        for text in filter(None, (momentum, self._settings.overlap_warning)):  # DiLoCo warns of it
            self.folder.append(WARNING, {"warning": text})

    def _is_in_batch(self) -> bool:
        return self._group.diloco is not None and self._group.diloco.counts_steps

    def join(self, diloco: DiLoCo, state: State) -> None:
        """Join the other groups: this waits for them."""
        diloco.counts_steps = False
        self.sync_log.report_phase("joining", state, diloco)
        diloco.__enter__()
        self.sync_log.log_start(state, diloco)
        self.console.joined(diloco, self.manager, self._group.is_resumed)
        if self._group.data is not None:
            self._group.data.start()
        when_fit_is_over(self._leave_after_error)

    def report(self, phase: str, state: State, logger: Logger) -> bool:
        """Report syncs and the position in training. Returns whether there was a sync."""
        diloco, data = self._group.diloco, self._group.data
        assert diloco is not None, "it has been built"
        reports = diloco.pop_finished_syncs()
        if self._heal_state is not None:
            self._heal_state.broadcast_from_rank_0(logger)
        if reports and self._membership is not None:
            self._membership.check()
        self.sync_log.log_syncs(reports, state, logger)
        self.console.synced(reports, self.manager)
        done = 0.0 if data is None else data.done(epochs_of(state))
        progress = self.sync_log.report_phase(phase, state, diloco, done)
        epochs = state.max_duration.value if done and state.max_duration else 0
        in_epoch = state.timestamp.batch_in_epoch.value
        self.console.show_position(progress, epochs, in_epoch, logger)
        if self._membership is not None:
            self._membership.report_progress(progress)
        if reports and data is not None:
            data.after_sync()
        return bool(reports)

    def _sync_idle(self, state: State, logger: Logger) -> None:
        """Take part in the others' next sync: there are no samples to train on at the moment."""
        diloco, data = self._group.diloco, self._group.data
        assert diloco is not None, "it is asked while training"
        with self._group.without_averages():
            diloco.sync_idle()
        if not self.report("training", state, logger) and data is not None:
            data.after_sync()

    def leave(self) -> None:
        """Stop counting steps and sending heartbeats, else the others would wait for this group.

        The DiLoCo and the data stay: a later fit may continue from them.
        """
        if sys.is_finalizing():
            return  # the threads have ended: no heartbeats are sent, and a wait would not return
        with self._leaving:
            self._group.stop()
            if self.manager is not None:
                self.manager.shutdown()
                self.manager = None
            if self._membership is not None:
                self._membership.leave()
                self._membership = None

    def _leave_after_error(self) -> None:
        """Leave when the fit is over. Does nothing if the fit has ended well."""
        with self._leaving:
            if self.manager is not None:
                self.leave()
                log.warning(
                    "This replica group has left: its fit ended with an error. The others "
                    "continue, and it joins them again if fit is called again"
                )
