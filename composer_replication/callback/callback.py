"""Run a Composer training job as one DiLoCo replica group."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch
from composer import Callback, Event, Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist
from torch import Tensor

from composer_replication.callback.checkpoint import CheckpointLayout, pack
from composer_replication.callback.checksums import checksums
from composer_replication.callback.composer_job import (
    build_diloco,
    build_manager,
    check_loads,
    check_parallelism,
    name_the_node,
    samples_in_batch,
    start_refusal_of,
    unwrapped,
)
from composer_replication.callback.evaluation import Evaluation
from composer_replication.callback.fit_watch import when_fit_is_over
from composer_replication.callback.global_weights import GlobalWeights
from composer_replication.callback.heal_state import HealState
from composer_replication.callback.next_fit import carry_over, replaced_since
from composer_replication.callback.progress import SyncLog, max_batches
from composer_replication.callback.resume import Resume
from composer_replication.callback.run_folder import ReplicaFolder
from composer_replication.callback.stuck_process import end_if_stuck_in_close
from composer_replication.callback.weight_averages import WeightAverages
from composer_replication.coordinator.client import RunInfo
from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.data.group_data import GroupData, group_data_of
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.arguments import pick, takes
from composer_replication.diloco.fragments import synced_tensors
from composer_replication.diloco.outer_optimizer import local_tensor
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import broadcast

log = logging.getLogger(__name__)
package_log = logging.getLogger("composer_replication")


@dataclass(frozen=True, kw_only=True)
class CallbackArguments(ReplicaOptions, DiLoCoSettings):
    """All arguments of :class:`DiLoCoCallback`.

    Args:
        manager: A manager to use for one fit, for simulations. None: build one. Not for YAML.
    """

    manager: Any = None

    def __post_init__(self) -> None:
        """The settings and the options check themselves, each apart."""


class DiLoCoCallback(Callback):
    """Make a Composer ``Trainer`` one replica group of a DiLoCo run.

    Each group is a Composer job of its own, under plain ``python``, ``composer -n N`` or
    ``torchrun``. The arguments are those of :class:`DiLoCoSettings`, equal in all groups, and of
    :class:`ReplicaOptions`, which may differ; both document them. ``replica_id``,
    ``num_replicas``, ``lighthouse_addr`` and ``run_dir`` default to environment variables.

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
    | ``diloco/sync_seconds``           | how long training was blocked by it                 |
    | ``diloco/wait_seconds``           | the part of it spent waiting for the quorum         |
    | ``diloco/compute_fraction``       | fraction of time since the last sync spent training |
    | ``diloco/bytes_sent``             | size of this rank's messages in the wire format     |
    | ``diloco/bytes_float32``          | size that they would have in float32                |
    | ``diloco/pseudo_gradient_norm``   | L2 norm of this group's pseudo-gradient             |
    | ``diloco/outer_momentum_norm``    | L2 norm of the fragment's outer momentum            |
    | ``diloco/steps_lost``             | inner steps dropped by a heal, or as not finite     |
    | ``diloco/retries``                | attempts that did not commit                        |
    | ``diloco/healed``                 | 1 if the group took over the global state in it     |
    | ``diloco/outer_lr``               | learning rate of the outer optimizer                |
    | ``diloco/settings_version``       | version of the settings in it; 0: no coordinator    |
    | ``diloco/global_digest``          | SHA-256 of the global parameters (run folder only)  |
    +-----------------------------------+-----------------------------------------------------+
    """

    @takes(CallbackArguments)
    def __init__(self, **given: Any) -> None:
        self._given = given  # a coordinator's settings are compared with what was given
        self.settings = pick(DiLoCoSettings, given)
        self.options = pick(ReplicaOptions, given).with_environment()
        name_the_node()
        if package_log.level == logging.NOTSET:
            package_log.setLevel(logging.INFO)  # llm-foundry sets a level for its own packages only
        self.diloco: DiLoCo | None = None
        self.result: dict[str, Any] = {}
        self._given_manager = given.get("manager")
        self._manager: Any = None
        self._leaving = threading.RLock()  # a thread of fit_watch also calls _leave
        self._run: RunInfo | None = None
        """What the coordinator says about the run, if there is one."""
        self._membership: Membership | None = None
        """This group's registration with it, during a fit."""
        self._data: GroupData | None = None
        """The samples that this group trains on, if the loader is one of ours."""
        self._start_refusal: str | None = None
        self._resume = Resume(self.settings, self.options.on_bad_state)
        self._ended: dict[str, Any] | None = None
        """DiLoCo's state at the end of the last fit."""
        self._left: dict[str, int] | None = None
        """Checksums of the model at the end of the last fit."""
        self._weights: GlobalWeights | None = None
        self._averages: WeightAverages | None = None
        self._loads_active_ema = False
        self._evaluation = Evaluation(self.options.eval_weights)
        self._layout: CheckpointLayout | None = None
        self._heal_state: HealState | None = None
        self._parent = os.getppid()
        self._folder = ReplicaFolder(None, "")
        self._sync_log = SyncLog(self._folder, self.settings.sync_every)

    # ---- Composer's events, in the order in which they come ---------------------------------

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if self.diloco is not None:
            self.diloco.note_progress()
        super().run_event(event, state, logger)

    def init(self, state: State, logger: Logger) -> None:
        # Put this callback before all others. A callback before it would run at fit_end on the
        # weights from before the final sync, and would export another model than the run's; the
        # other groups would also wait for it, and for its close. Composer runs loggers separately,
        # and iterates over a copy of this list.
        others = [each for each in state.callbacks if each is not self]
        loggers = [each for each in others if isinstance(each, LoggerDestination)]
        rest = [each for each in others if not isinstance(each, LoggerDestination)]
        state.callbacks[:] = [*loggers, self, *rest]

    def before_load(self, state: State, logger: Logger) -> None:
        if self.options.coordinator_addr is not None:
            self._run = ask_for_run(self.options)
            self.settings = self._run.settings
            self.options = self._run.adopt(self.options, self._given)
            kept = self._resume.state_dict()  # LoadCheckpoint may have loaded a state at INIT
            self._resume = Resume(self.settings, self.options.on_bad_state)
            self._resume.keep(kept)
        self._resume.before_load(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Composer loads checkpoints before fit_start, where DiLoCo is built that it is loaded into.
        self._resume.keep(state)

    def after_load(self, state: State, logger: Logger) -> None:
        self._resume.after_load(state)
        self._loads_active_ema = WeightAverages(state).is_ema_active

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.diloco is not None:
            self._end_failed_fit()
        if self._given_manager is not None and self._ended is not None:
            raise ValueError(
                "manager= can be used for one fit only, since it leaves the other groups after it: "
                "give the next fit a new DiLoCoCallback with a new manager"
            )
        check_parallelism(state)
        check_loads(state)
        also_synced = self._names_before()
        self._averages = WeightAverages(state)
        if self._loads_active_ema:  # an evaluation before fit may have swapped it out
            self._averages.put_in()
        self._loads_active_ema = False
        resumed = self._resume.read(state)
        ema_was_active = self._averages.take_out(None if resumed is None else resumed[1])
        run_dir = self.options.run_dir if dist.get_global_rank() == 0 else None
        self._folder = ReplicaFolder(run_dir, replica_id_of(self.options))
        self._sync_log = SyncLog(self._folder, self.settings.sync_every)
        is_new = resumed is None and self._ended is None
        known_step = self._run.outer_step if self._run is not None else 0
        self._start_refusal = start_refusal_of(self.options, state, known_step) if is_new else None
        if self._run is not None:
            synced = synced_tensors(unwrapped(state), self.settings, also_synced)
            self._membership = Membership(self.options, self._run, synced, dist.get_world_size())
        try:
            self._manager = self._given_manager or build_manager(self.options, state)
            self._heal_state = HealState(
                state, self.options.heal_inner_state, self._is_in_batch, self._averages
            )
            save, load = self._heal_state.state_dict, self._heal_state.load_state_dict
            self._manager.register_state_dict_fn("composer", load, save)
            self.diloco = build_diloco(
                self.settings,
                self.options,
                self._manager,
                state,
                self._start_refusal,
                also_synced,
            )
            sync_idle = functools.partial(self._sync_idle, state, logger)
            self._data = group_data_of(
                state, self.options, self.diloco, self._membership, sync_idle
            )
            self._layout = self._resume.layout(state, also_synced)
            self._continue_from(resumed, state)
            self.diloco.counts_steps = False
            self._sync_log.report_phase("joining", state, self.diloco)
            self.diloco.__enter__()
            if self._data is not None:
                self._data.start()
            when_fit_is_over(functools.partial(self._leave_after_error, self._manager))
        except BaseException:
            self._leave()  # the others would wait for this group while it sends heartbeats
            self.diloco = self._data = None
            raise
        if resumed is not None:
            self._sync_log.log_resume(state, self.diloco)
        self._report("training", state, logger)
        if ema_was_active:
            self._averages.put_in()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self._data is not None:
            self._data.before_batch(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        if self._data is not None:
            self.diloco.expect_position(self._data.position.samples)
        # Only optimizer steps inside a batch count: torch's get_optimizer_state_dict and
        # set_optimizer_state_dict call step(), at a load and, for SGD, at every save.
        self.diloco.counts_steps = True
        if max_batches(state) == state.timestamp.batch.value + 1:
            self.diloco.expect_last_step()
        if self.settings.weight_by == "samples":
            self.diloco.count_samples(samples_in_batch(state))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        self.diloco.counts_steps = False
        if self._data is not None:
            self._data.after_batch()
        self._check_launcher()
        self._sync_log.count_batch(state)
        if self._report("training", state, logger) and broadcast(self._folder.asks_to_stop):
            log.info(
                "Ending after outer step %d: the run's folder contains STOP", self.diloco.outer_step
            )
            state.stop_training()

    # During a fit, evaluators run between the first two of these events; in Trainer.eval, between
    # the other two.

    def eval_before_all(self, state: State, logger: Logger) -> None:
        if self._weights is not None:
            self._evaluation.open(self._weights, self._evaluates_as_is())

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._weights is not None:
            self._evaluation.close(self._weights)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self.eval_before_all(state, logger)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self.eval_after_all(state, logger)

    def state_dict(self) -> dict[str, Any]:
        # A collective under FSDP. Composer calls it on every rank.
        if self.diloco is not None:
            return self._packed(self._diloco_state())  # Composer writes it at once
        return self._resume.state_dict() if self._ended is None else self._packed(self._ended)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        assert self._averages is not None and self._layout is not None, "fit_start has made them"
        with self._averages.out_of_the_model():
            if self.options.final_sync:
                self.diloco.final_sync()
            self._left = checksums(self._layout.live)
        self._report("evaluating", state, logger)
        self.result = {
            "replica_id": replica_id_of(self.options),
            "inner_steps": self.diloco.inner_steps,
            "outer_steps": self.diloco.outer_step,
            "global_digest": self.diloco.global_digest(),
            "final_loss": self._sync_log.final_loss,
            "eval": {},
        }
        if self._data is not None:
            self._data.end()
        self._ended = self._diloco_state()  # without copies, since there is no next inner step
        # Under DDP this is a gathered copy, so that rank 0 alone may save the model after the fit.
        assert self._weights is not None, "fit_start has made it"
        self._weights.read_from(
            {name: t for f in self._ended["fragments"] for name, t in f["theta"].items()}
        )
        self._leave()
        self.diloco = self._data = None
        # This comes last, since it raises on a full disk: by now this group has left in order.
        self._folder.write_result(self.result)

    def close(self, state: State, logger: Logger) -> None:
        error = sys.exc_info()[1]
        if self.diloco is not None or error is not None:  # before fit_end, or after it
            end_if_stuck_in_close(error)  # other ranks may never reach Composer's barrier
        self._leave()
        self.diloco = self._data = None
        if self._weights is not None:
            self._weights.remove()

    def _report(self, phase: str, state: State, logger: Logger) -> bool:
        """Report syncs and the position in training. Returns whether there was a sync."""
        assert self.diloco is not None
        reports = self.diloco.pop_finished_syncs()
        if self._heal_state is not None:
            self._heal_state.broadcast_from_rank_0(logger)
        if reports and self._membership is not None:
            self.diloco.offer_settings(self._membership.known_settings())
        self._sync_log.log_syncs(reports, state, logger)
        progress = self._sync_log.report_phase(phase, state, self.diloco)
        if self._membership is not None:
            self._membership.report_progress(progress)
        if reports and self._data is not None:
            self._data.after_sync()
        return bool(reports)

    def _sync_idle(self, state: State, logger: Logger) -> None:
        """Take part in the others' next sync: there are no samples to train on at the moment."""
        assert self.diloco is not None and self._averages is not None, "it is asked while training"
        with self._averages.out_of_the_model():
            self.diloco.sync_idle()
        if not self._report("training", state, logger) and self._data is not None:
            self._data.after_sync()

    def _check_launcher(self) -> None:
        """Check that the launcher lives.

        A rank that outlives its launcher would vote beside the group that is started again.

        Raises:
            RuntimeError: The launcher has died.
        """
        if dist.get_world_size() > 1 and os.getppid() != self._parent:
            raise RuntimeError(
                "the launcher of this group's ranks has died, so this rank ends. Start the group "
                "again: it takes over the other groups' state"
            )

    def _is_in_batch(self) -> bool:
        return self.diloco is not None and self.diloco.counts_steps

    # ---- building ---------------------------------------------------------------------------

    def _names_before(self) -> set[str]:
        """Return the names in the global state of the last fit, or of the loaded checkpoint."""
        fragments = self._ended["fragments"] if self._ended is not None else ()
        return {*self._resume.names, *(name for f in fragments for name in f["theta"])}

    def _continue_from(
        self, resumed: tuple[dict[str, Any], dict[str, Tensor]] | None, state: State
    ) -> None:
        """Load the state of a checkpoint or of the last fit, if there is either."""
        assert self.diloco is not None and self._averages is not None, "they have just been built"
        if self._weights is not None:
            self._weights.remove()
        assert self._layout is not None, "it has been made too"
        diloco_state = None
        if resumed is not None:
            diloco_state, local = resumed
            self.diloco.load_state_dict(diloco_state)
            with torch.no_grad():
                for name, tensor in local.items():
                    local_tensor(self._layout.live[name]).copy_(tensor)
        elif self._ended is not None:
            replaced = replaced_since(self._left, self._layout.live)
            fresh = self.diloco.state_dict(copies=False)
            diloco_state = carry_over(self._ended, fresh, replaced)
            self.diloco.load_state_dict(diloco_state)
        if diloco_state is not None and self._data is not None:
            self._data.load_state_dict(diloco_state["reading"])
        theta = self.diloco.global_parameters()
        self._weights = GlobalWeights(
            unwrapped(state), theta, lambda: self._saved_model() != "global"
        )
        self._averages.wrap(self._weights, self.diloco.make_local_global)
        if self._membership is not None:
            self.diloco.offer_settings(self._membership.known_settings())

    def _diloco_state(self) -> dict[str, Any]:
        """Return DiLoCo's state with its own tensors, valid until the next inner step."""
        assert self.diloco is not None, "called while there is one"
        diloco_state = self.diloco.state_dict(copies=False)
        if self._data is not None:
            diloco_state["reading"] |= self._data.state_dict()
        return diloco_state

    def _packed(self, diloco_state: dict[str, Any]) -> dict[str, Any]:
        assert self._weights is not None and self._layout is not None, "fit_start has made them"
        assert self._averages is not None, "it has made them too"
        local = self._averages.local(self._weights.local())
        saved = self._weights.saved
        return pack(diloco_state, local, saved, self._layout, self._saved_model())

    def _saved_model(self) -> str:
        """Which weights Composer saves as the model: ``global``, ``ema`` or ``local``."""
        if self._averages is not None and self._averages.is_ema_active:
            return "ema"
        return "local" if self._replaces_global else "global"

    def _evaluates_as_is(self) -> bool:
        """Whether evaluators see the model as it is, since EMA or SWA has put its weights there."""
        has_ema = self._averages is not None and self._averages.has_ema_started
        return has_ema or self._replaces_global

    @property
    def _replaces_global(self) -> bool:
        """Whether SWA's average is in the model and not yet in the global weights."""
        if self.diloco is not None:
            return self.diloco.replaces_global
        return self._ended is not None and any(self._ended["replaces_global"])

    def _leave_after_error(self, manager: Any) -> None:
        """Leave when the fit of this manager is over. Does nothing if the fit has ended well."""
        with self._leaving:
            if self._manager is manager:
                self._leave()
                log.warning(
                    "This replica group has left: its fit ended with an error. The others "
                    "continue, and it joins them again if fit is called again"
                )

    def _end_failed_fit(self) -> None:
        """Keep the state of a fit that raised, for the fit that begins now."""
        assert self.diloco is not None, "the caller has checked that"
        self._leave()
        self._ended, self._left = self._diloco_state(), None
        self.diloco = self._data = None
        log.info("Continuing from the state of the fit that failed")

    def _leave(self) -> None:
        """Stop counting steps and sending heartbeats, else the others would wait for this group.

        The DiLoCo and the data stay: a later fit may continue from them.
        """
        if sys.is_finalizing():
            return  # the threads have ended: no heartbeats are sent, and a wait would not return
        with self._leaving:
            if self._averages is not None:
                self._averages.unwrap()
            if self.diloco is not None:
                self.diloco.__exit__(None, None, None)
            if self._manager is not None:
                self._manager.shutdown()
                self._manager = None
            if self._data is not None:
                self._data.close()
            if self._membership is not None:
                self._membership.leave()
                self._membership = None
