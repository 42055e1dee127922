"""Run a Composer training job as one DiLoCo replica group."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from composer import Callback, Event, Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist

from composer_replication.callback.composer_job import (
    check_loads,
    check_parallelism,
    count_in_batch,
    epochs_of,
    metrics_of,
    name_the_node,
    own_buffers,
)
from composer_replication.callback.fit import Fit
from composer_replication.callback.group_state import GroupState, Resume
from composer_replication.callback.progress import max_batches
from composer_replication.callback.trainer_watch import end_if_stuck_in_close
from composer_replication.coordinator.client import RunInfo
from composer_replication.coordinator.membership import ask_for_run
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.arguments import pick, takes
from composer_replication.diloco.fence import fence
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.group.global_weights import Evaluation
from composer_replication.group.run_folder import ERROR, EVALUATION, ReplicaFolder
from composer_replication.replica.options import DuplicateIdError, ReplicaOptions, replica_id_of
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


class DiLoCoCallback(Callback):
    """Make a Composer ``Trainer`` one replica group of a DiLoCo run.

    Each group is a Composer job of its own, under plain ``python``, ``composer -n N`` or
    ``torchrun``. The arguments are those of :class:`DiLoCoSettings`, equal in all groups, and of
    ``ReplicaOptions``, which may differ; both document them. ``replica_id``,
    ``num_replicas``, ``lighthouse_addr`` and ``run_dir`` default to environment variables. With
    ``num_replicas=1`` and no lighthouse the job trains alone, without a network.

    Example:
        .. code-block:: yaml

            callbacks:
              diloco:
                sync_every: 100
                num_fragments: 2
                fragment_sync_delay: 5
                fragment_update_alpha: 0.5

    Logs at every committed sync:

    ===============================  ===================================================
    Key                              Value
    ===============================  ===================================================
    ``diloco/outer_step``            outer steps committed so far
    ``diloco/round``                 rounds so far
    ``diloco/fragment``              which fragment was synchronised, from 0
    ``diloco/num_participants``      groups in the quorum
    ``diloco/contribution``          this group's weight in the mean
    ``diloco/total_contribution``    the sum of all weights
    ``diloco/sync_seconds``          how long training was blocked by it
    ``diloco/wait_seconds``          the part of it spent waiting for the quorum
    ``diloco/compute_fraction``      fraction of time since the last sync spent training
    ``diloco/bytes_sent``            size of this rank's messages in the wire format
    ``diloco/bytes_float32``         size that they would have in float32
    ``diloco/pseudo_gradient_norm``  L2 norm of this group's pseudo-gradient
    ``diloco/outer_momentum_norm``   L2 norm of the fragment's outer momentum
    ``diloco/momentum_cosine``       cosine of the mean pseudo-gradient and the momentum
    ``diloco/group_cosine``          mean cosine of two groups' pseudo-gradients
    ``diloco/mean_norm_ratio``       norm of the mean pseudo-gradient / mean of norms
    ``diloco/sync_every``            inner steps of this group in a round
    ``diloco/steps_lost``            inner steps dropped by a heal, or as not finite
    ``diloco/retries``               attempts that did not commit
    ``diloco/healed``                1 if the group took over the global state in it
    ``diloco/outer_lr``              learning rate of the outer optimizer
    ``diloco/outer_momentum``        momentum of the outer optimizer
    ``diloco/global_digest``         SHA-256 of the global parameters (run folder only)
    ===============================  ===================================================
    """

    @takes(CallbackArguments)
    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments  # a coordinator's settings are compared with what was given
        self.settings = pick(DiLoCoSettings, arguments)
        self.options = pick(ReplicaOptions, arguments).with_environment()
        name_the_node()
        if package_log.level == logging.NOTSET:
            package_log.setLevel(logging.INFO)  # llm-foundry sets a level for its own packages only
        self.result: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        """The metrics of the last evaluation by name, which become a part of the result."""
        self._passed_manager = arguments.get("manager")
        self._run: RunInfo | None = None
        """What the coordinator says about the run, if there is one."""
        self._fit: Fit | None = None
        """The fit that is running, or the last one."""
        self._group = GroupState(Resume(self.settings))
        self._evaluation = Evaluation(self.options.eval_weights)
        self._parent = os.getppid()

    @property
    def diloco(self) -> DiLoCo | None:
        """DiLoCo, during a fit."""
        return self._group.diloco

    # ---- Composer's events, in the order in which they come ---------------------------------

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if self.diloco is not None:
            self.diloco.hang_watch.note_progress()
        try:
            super().run_event(event, state, logger)
        except ValueError as error:
            # A script's exit status does not say that its input was rejected, so the folder does.
            # A name that is taken may be free the next time.
            is_first = event in (Event.INIT, Event.BEFORE_LOAD, Event.FIT_START)
            if is_first and not isinstance(error, DuplicateIdError):
                self._write_rejection(error)
            raise

    def init(self, state: State, logger: Logger) -> None:
        check_parallelism(state)  # here, since Composer shards the model after this event
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
            self.options = self._run.adopt(self.options, self._arguments)
            kept = self._group.resume.state_dict()  # LoadCheckpoint may have loaded a state at INIT
            self._group.resume = Resume(self.settings)
            self._group.resume.keep(kept)
        self._group.resume.before_load(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Composer loads checkpoints before fit_start, where DiLoCo is built that it is loaded into.
        self._group.resume.keep(state)

    def after_load(self, state: State, logger: Logger) -> None:
        self._group.after_load(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._fit is not None and self.diloco is not None:
            self._end_failed_fit(self._fit)
        self._check(state)
        self._group.restore(state)
        self._fit = fit = Fit(self._group, self.settings, self.options, self._run)
        try:
            diloco = fit.connect(self._passed_manager, state, logger)
            fit.join(diloco, state)
        except BaseException:
            fit.leave()  # the others would wait for this group while it sends heartbeats
            self._group.drop()
            raise
        if self._group.is_resumed:
            fit.sync_log.log_resume(state, diloco)
        fit.report("training", state, logger)
        self._group.put_ema_back()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self._group.data is not None:
            now = state.timestamp
            self._group.data.before_batch(
                now.epoch.value, now.batch_in_epoch.value, epochs_of(state)
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.diloco is None:
            return
        if self._group.data is not None:
            self.diloco.ledger.position = self._group.data.position.samples
        # Only optimizer steps inside a batch count: torch's get_optimizer_state_dict and
        # set_optimizer_state_dict call step(), at a load and, for SGD, at every save.
        self.diloco.counts_steps = True
        if max_batches(state) == state.timestamp.batch.value + 1:
            self.diloco.expect_last_step()
        self.diloco.note_batch(state.batch)
        if self.settings.weight_by == "samples":
            self.diloco.count_samples(count_in_batch(state, "samples"))
        elif self.settings.weight_by == "tokens":
            self.diloco.count_tokens(count_in_batch(state, "tokens"))

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None or self._fit is None:
            return
        self.diloco.counts_steps = False
        self.diloco.forget_counted()  # of a batch whose step the grad scaler has skipped
        if self._group.data is not None:
            self._group.data.after_batch()
        self._check_launcher()
        self._fit.sync_log.count_batch(state, self.diloco)
        if self._fit.report("training", state, logger) and broadcast(self._fit.folder.asks_to_stop):
            log.info(
                "Ending after outer step %d: the run's folder contains STOP", self.diloco.outer_step
            )
            state.stop_training()

    # During a fit, evaluators run between the first two of these events; in Trainer.eval, between
    # the other two.

    def eval_before_all(self, state: State, logger: Logger) -> None:
        if self._group.weights is not None:
            self._evaluation.open(self._group.weights, self._group.evaluates_as_is)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.eval_standalone_end(state, logger)
        self._metrics = metrics_of(state)
        if self._fit is None:
            return
        batch = state.timestamp.batch.value
        self._fit.folder.append(EVALUATION, {"batch": batch, "eval": self._metrics})
        if self.result and self.diloco is None:
            # Composer's last evaluation of a fit comes after fit_end.
            self.result["eval"] = self._metrics
            self._fit.folder.write_end(self.result)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        self.eval_before_all(state, logger)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        if self._group.weights is not None:
            self._evaluation.close(self._group.weights)

    def state_dict(self) -> dict[str, Any]:
        # A collective under FSDP. Composer calls it on every rank.
        return self._group.state_dict()

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.diloco is None or self._fit is None:
            return
        with self._group.without_averages():
            if self.options.final_sync:
                self.diloco.final_sync()
            self._group.note_final_weights()
        self._fit.report("evaluating", state, logger)
        self.result = {
            "replica_id": replica_id_of(self.options),
            "inner_steps": self.diloco.inner_steps,
            "outer_steps": self.diloco.outer_step,
            "global_digest": self.diloco.global_digest(),
            "final_loss": self._fit.sync_log.final_loss,
            "own_buffers": own_buffers(state, self.settings),
            "eval": self._metrics,
        }
        if self._group.data is not None:
            self._group.data.end()
        self._group.keep()
        self._fit.leave()
        self._group.drop()
        self._fit.folder.write_end(self.result)
        log.info(
            "Ended after %d outer steps: global parameters %s",
            self.result["outer_steps"],
            self.result["global_digest"][:8],
        )

    def close(self, state: State, logger: Logger) -> None:
        if sys.is_finalizing():
            return  # nobody has closed the Trainer, and torch has been taken apart
        error = sys.exc_info()[1]
        if self.diloco is not None or error is not None:  # before fit_end, or after it
            end_if_stuck_in_close(error)  # other ranks may never reach Composer's barrier
        if self._fit is not None:
            if error is not None:
                self._fit.folder.append(ERROR, {"error": f"{type(error).__name__}: {error}"})
            self._fit.leave()
        self._group.drop()
        if self._group.weights is not None:
            self._group.weights.remove()

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

    def _check(self, state: State) -> None:
        """Refuse what cannot be trained, before anything is changed."""
        if self._passed_manager is not None and self._group.ended is not None:
            raise ValueError(
                "manager= can be used for one fit only, since it leaves the other groups after it: "
                "give the next fit a new DiLoCoCallback with a new manager"
            )
        check_loads(state)

    @fence("in the run's folder why this group is rejected")
    def _write_rejection(self, error: ValueError) -> None:
        if self.options.replica_id is not None and dist.get_global_rank() == 0:
            ReplicaFolder(self.options.run_dir, self.options.replica_id).write_rejection(str(error))

    def _end_failed_fit(self, fit: Fit) -> None:
        """Keep the state of a fit that raised, for the fit that begins now."""
        fit.leave()
        self._group.keep(has_failed=True)
        self._group.drop()
        log.info("Continuing from the state of the fit that failed")
