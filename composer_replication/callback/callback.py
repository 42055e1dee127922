"""Run a Composer training job as one DiLoCo replica group."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from composer import Callback, Event, Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist

from composer_replication.callback.composer_job import (
    build_diloco,
    build_manager,
    check_loads,
    check_parallelism,
    name_the_node,
    samples_in_batch,
    unwrapped,
    why_not_start,
)
from composer_replication.callback.evaluation import Evaluation
from composer_replication.callback.fit_watch import when_fit_is_over
from composer_replication.callback.group_state import GroupState
from composer_replication.callback.heal_state import Handover
from composer_replication.callback.progress import Progress, max_batches
from composer_replication.callback.resume import Resume
from composer_replication.callback.run_folder import ReplicaFolder
from composer_replication.callback.stuck_process import end_if_stuck_in_close
from composer_replication.coordinator.client import RunInfo
from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.data.group_data import group_data_of
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.arguments import pick, takes
from composer_replication.diloco.fragments import synced_tensors
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import broadcast

log = logging.getLogger(__name__)
package_log = logging.getLogger("composer_replication")


@dataclass(frozen=True, kw_only=True)
class CallbackArguments(ReplicaOptions, DiLoCoSettings):
    """All arguments of :class:`DiLoCoCallback`.

    Args:
        manager: Use this manager, for one fit, instead of building one: for simulations. Not for
            YAML.
    """

    manager: Any = None

    def __post_init__(self) -> None:
        """The settings and the options check themselves, each apart."""


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
    | ``diloco/bytes_sent``             | size of this rank's messages, as they travel        |
    | ``diloco/bytes_float32``          | size that they would have in float32                |
    | ``diloco/pseudo_gradient_norm``   | L2 norm of this group's pseudo-gradient             |
    | ``diloco/outer_momentum_norm``    | L2 norm of the fragment's outer momentum            |
    | ``diloco/steps_lost``             | inner steps thrown away, by a heal or not finite    |
    | ``diloco/retries``                | attempts that did not commit                        |
    | ``diloco/healed``                 | 1 if the group took over the global state in it     |
    | ``diloco/outer_lr``               | learning rate of the outer optimizer in it          |
    | ``diloco/settings_version``       | of the settings in force in it; 0: no coordinator   |
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
            package_log.setLevel(logging.INFO)  # llm-foundry lets only its own packages speak
        self.result: dict[str, Any] = {}
        self._given_manager = given.get("manager")
        self._manager: Any = None
        self._leaving = threading.RLock()  # when a fit has failed, another thread leaves
        self._run: RunInfo | None = None
        """What the coordinator says about the run, if there is one."""
        self._membership: Membership | None = None
        """This group's registration with it, during a fit."""
        self._group = GroupState(Resume(self.settings, self.options.on_bad_state))
        self._evaluation = Evaluation(self.options.eval_weights)
        self._handover: Handover | None = None
        self._parent = os.getppid()
        self._folder = ReplicaFolder(None, "")
        self._progress = Progress(self._folder, self.settings.sync_every)

    @property
    def diloco(self) -> DiLoCo | None:
        """DiLoCo, during a fit."""
        return self._group.diloco

    # ---- Composer's events, in the order in which they come ---------------------------------

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if self.diloco is not None:
            self.diloco.note_progress()
        super().run_event(event, state, logger)

    def init(self, state: State, logger: Logger) -> None:
        # Whatever stands before this callback acts at fit_end on weights from before the final
        # sync, and an export there is another model than the run's. While it acts, and while it
        # closes, the other groups wait for this one. So all others come after it. Loggers are run
        # apart; the engine goes through a copy of this list.
        others = [each for each in state.callbacks if each is not self]
        loggers = [each for each in others if isinstance(each, LoggerDestination)]
        rest = [each for each in others if not isinstance(each, LoggerDestination)]
        state.callbacks[:] = [*loggers, self, *rest]

    def before_load(self, state: State, logger: Logger) -> None:
        if self.options.coordinator_addr is not None:
            self._run = ask_for_run(self.options)
            self.settings = self._run.settings
            self.options = self._run.adopt(self.options, self._given)
            kept = self._group.resume.state_dict()  # LoadCheckpoint may have loaded it at INIT
            self._group.resume = Resume(self.settings, self.options.on_bad_state)
            self._group.resume.keep(kept)
        self._group.resume.before_load(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Composer loads checkpoints before fit_start: keep it until there is something to load.
        self._group.resume.keep(state)

    def after_load(self, state: State, logger: Logger) -> None:
        self._group.after_load(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.diloco is not None:
            self._end_failed_fit()
        self._check(state)
        self._group.restore(state)
        try:
            diloco = self._build(state, logger)
            self._join(diloco, state)
        except BaseException:
            self._leave()  # no heartbeat of ours may hold the others up
            self._group.drop()
            raise
        if self._group.is_resumed:
            self._progress.tell_resume(state, diloco)
        self._tell("training", state, logger)
        self._group.put_ema_back()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self._group.data is not None:
            self._group.data.before_batch(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        if self._group.data is not None:
            self.diloco.expect_position(self._group.data.position.samples)
        # Only steps inside a batch count: torch's get_optimizer_state_dict and
        # set_optimizer_state_dict make hidden ones, at a load and, for SGD, at every save.
        self.diloco.counts_steps = True
        if max_batches(state) == state.timestamp.batch.value + 1:
            self.diloco.expect_last_step()
        if self.settings.weight_by == "samples":
            self.diloco.count_samples(samples_in_batch(state))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        self.diloco.counts_steps = False
        if self._group.data is not None:
            self._group.data.after_batch()
        self._check_launcher()
        self._progress.count_batch(state)
        if self._tell("training", state, logger) and broadcast(self._folder.asks_to_stop):
            log.info(
                "Ending after outer step %d: the run's folder says STOP", self.diloco.outer_step
            )
            state.stop_training()

    # During a fit Composer evaluates between the first two of these, in Trainer.eval between the
    # others; a fit inside a fit there is not.

    def eval_before_all(self, state: State, logger: Logger) -> None:
        if self._group.weights is not None:
            self._evaluation.open(self._group.weights, self._group.evaluates_as_is)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        if self._group.weights is not None:
            self._evaluation.close(self._group.weights)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self.eval_before_all(state, logger)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self.eval_after_all(state, logger)

    def state_dict(self) -> dict[str, Any]:
        return self._group.state_dict()  # a collective under FSDP, and every rank is asked

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        with self._group.without_averages():
            if self.options.final_sync:
                self.diloco.final_sync()
            self._group.note_final_weights()
        self._tell("evaluating", state, logger)
        self.result = {
            "replica_id": replica_id_of(self.options),
            "inner_steps": self.diloco.inner_steps,
            "outer_steps": self.diloco.outer_step,
            "global_digest": self.diloco.global_digest(),
            "final_loss": self._progress.final_loss,
            "eval": {},
        }
        if self._group.data is not None:
            self._group.data.end()
        self._group.keep()
        self._leave()
        self._group.drop()
        # Last, since it fails on a full disk: the others and the coordinator know all by then.
        self._folder.write_result(self.result)

    def close(self, state: State, logger: Logger) -> None:
        error = sys.exc_info()[1]
        if self.diloco is not None or error is not None:  # before fit_end, or in what follows it
            end_if_stuck_in_close(error)  # Composer's barrier comes next; other ranks may not
        self._leave()
        self._group.drop()
        if self._group.weights is not None:
            self._group.weights.remove()

    def _tell(self, phase: str, state: State, logger: Logger) -> bool:
        """Tell of what has happened. True if there was a sync."""
        assert self.diloco is not None
        reports = self.diloco.pop_finished_syncs()
        if self._handover is not None:
            self._handover.level_ranks(logger)
        if reports and self._membership is not None:
            self.diloco.offer_settings(self._membership.known_settings())
        self._progress.tell_syncs(reports, state, logger)
        told = self._progress.tell_phase(phase, state, self.diloco)
        if self._membership is not None:
            self._membership.report_progress(told)
        if reports and self._group.data is not None:
            self._group.data.after_sync()
        return bool(reports)

    def _sync_idle(self, state: State, logger: Logger) -> None:
        """Take part in the others' next sync: there are no samples to train on at the moment."""
        assert self.diloco is not None, "it is asked while training"
        with self._group.without_averages():
            self.diloco.stand_by()
        if not self._tell("training", state, logger) and self._group.data is not None:
            self._group.data.after_sync()

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

    # ---- the phases of fit_start ------------------------------------------------------------

    def _check(self, state: State) -> None:
        """Refuse what cannot be trained, before anything is changed."""
        if self._given_manager is not None and self._group.ended is not None:
            raise ValueError(
                "manager= is good for one fit, after which it has left the other groups: give "
                "the next fit a new DiLoCoCallback with a new manager"
            )
        check_parallelism(state)
        check_loads(state)

    def _build(self, state: State, logger: Logger) -> DiLoCo:
        """Connect with the coordinator and the other groups, and build DiLoCo on that."""
        run_dir = self.options.run_dir if dist.get_global_rank() == 0 else None
        self._folder = ReplicaFolder(run_dir, replica_id_of(self.options))
        self._progress = Progress(self._folder, self.settings.sync_every)
        also_synced, averages = self._group.also_synced, self._group.averages
        known_step = self._run.outer_step if self._run is not None else 0
        is_new = self._group.is_new
        must_not_start = why_not_start(self.options, state, known_step) if is_new else None
        if self._run is not None:
            synced = synced_tensors(unwrapped(state), self.settings, also_synced)
            named = {name: tensor for fragment in synced for name, tensor in fragment.items()}
            self._membership = Membership(self.options, self._run, named, dist.get_world_size())
        self._manager = self._given_manager or build_manager(self.options, state)
        assert averages is not None, "the state has been restored"
        self._handover = Handover(state, self.options.heal_inner_state, self._is_in_batch, averages)
        give, take = self._handover.give, self._handover.take
        self._manager.register_state_dict_fn("composer", take, give)
        diloco = build_diloco(
            self.settings, self.options, self._manager, state, must_not_start, also_synced
        )
        sync_idle = functools.partial(self._sync_idle, state, logger)
        data = group_data_of(state, self.options, diloco, self._membership, sync_idle)
        self._group.begin(state, diloco, data)
        if self._membership is not None:
            diloco.offer_settings(self._membership.known_settings())
        return diloco

    def _join(self, diloco: DiLoCo, state: State) -> None:
        """Join the other groups: this waits for them."""
        diloco.counts_steps = False
        self._progress.tell_phase("joining", state, diloco)
        diloco.__enter__()
        if self._group.data is not None:
            self._group.data.start()
        when_fit_is_over(functools.partial(self._leave_after_error, self._manager))

    # ---- leaving ----------------------------------------------------------------------------

    def _leave_after_error(self, manager: Any) -> None:
        """The fit that this manager was made for is over; nothing to do if it ended well."""
        with self._leaving:
            if self._manager is manager:
                self._leave()
                log.warning(
                    "This replica group has left: its fit ended with an error. The others go on; "
                    "it joins them again if fit is called again"
                )

    def _end_failed_fit(self) -> None:
        """Keep what a fit that raised has left, for the one that now begins."""
        assert self.diloco is not None, "it has left that"
        self._leave()
        self._group.keep(has_failed=True)
        self._group.drop()
        log.info("Continuing from what the fit that failed has left")

    def _leave(self) -> None:
        """Stop counting and stop the heartbeats, before the last evaluation: others would wait.

        The DiLoCo and the data stay: a later fit may continue from them.
        """
        if sys.is_finalizing():
            return  # there are no more threads, so no heartbeats, and no answer to a wait
        with self._leaving:
            if self._group.averages is not None:
                self._group.averages.unwrap()
            if self.diloco is not None:
                self.diloco.__exit__(None, None, None)
            if self._manager is not None:
                self._manager.shutdown()
                self._manager = None
            if self._group.data is not None:
                self._group.data.close()
            if self._membership is not None:
                self._membership.leave()
                self._membership = None
