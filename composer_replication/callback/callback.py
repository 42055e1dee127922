"""Run a Composer training job as one DiLoCo replica group."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any, Unpack

from composer import Callback, Event, Logger, State, Trainer
from composer.loggers import LoggerDestination

from composer_replication.arguments import shows
from composer_replication.callback.checkpoint_savers import check_load_path
from composer_replication.callback.composer_job import (
    ComposerJob,
    check_algorithms,
    check_loads,
    check_parallelism,
    metrics_of,
    name_the_node,
)
from composer_replication.callback.trainer_watch import end_if_stuck_in_close
from composer_replication.group.host import GroupKeywords, check_is_one
from composer_replication.group.replica_group import ReplicaGroup, ShowsGroup
from composer_replication.group.reports import rejections

BEFORE_STEPS = {Event.INIT, Event.BEFORE_LOAD, Event.FIT_START}
"""Events in which the job's input may be rejected."""


class DiLoCoCallback(ShowsGroup, Callback):
    """Make a Composer ``Trainer`` one replica group of a DiLoCo run.

    Each group is a Composer job of its own, under plain ``python``, ``composer -n N`` or
    ``torchrun``. It takes the settings of the run by name (``SettingKeywords``), which have to be
    equal in all groups, and the options of the group (``OptionKeywords``), which may differ.
    ``replica_id``, ``num_replicas``, ``lighthouse_addr`` and ``run_dir`` default to environment
    variables. With ``num_replicas=1`` and no lighthouse the job trains alone, without a network.

    Example:
        .. code-block:: yaml

            callbacks:
              diloco:
                sync_every: 100
                num_fragments: 2
                fragment_sync_delay: 5
                fragment_update_alpha: 0.5

    Logs each number of a :class:`composer_replication.SyncReport` at every committed sync, as
    ``diloco/`` and its name, and ``diloco/round``, the rounds so far.
    """

    @shows(GroupKeywords)
    def __init__(self, *, manager: Any = None, **named: Unpack[GroupKeywords]) -> None:
        """Check the arguments.

        Args:
            manager: A manager to use for one fit, for simulations. None: build one. Not for YAML.
        """
        self._job = ComposerJob()
        self._group = ReplicaGroup(self._job, named, "DiLoCoCallback", manager)
        self._job.averages.group = self._group
        self._is_loading = False
        self._unhandled = {
            event
            for event in Event  # a subclass may handle more than this class
            if getattr(type(self), event.value) is getattr(Callback, event.value)
        }
        name_the_node()

    # ---- Composer's events, in the order in which they come ---------------------------------

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self._group.note_progress()
        if event in self._unhandled:  # most of the 13 events of a step
            return
        self._job.state = state
        self._job.averages.state = state
        self._job.logger = logger
        with rejections(self.options) if event in BEFORE_STEPS else nullcontext():
            super().run_event(event, state, logger)

    def init(self, state: State, logger: Logger) -> None:
        check_parallelism(state)  # here, since Composer shards the model after this event
        check_algorithms(state)
        check_is_one(state.callbacks, DiLoCoCallback)
        # Put this callback before all others. A callback before it would run at fit_end on the
        # weights from before the final sync, and would export another model than the run's; the
        # other groups would also wait for it, and for its close. Composer runs loggers separately,
        # and iterates over a copy of this list.
        state.callbacks.sort(
            key=lambda each: (not isinstance(each, LoggerDestination), each is not self)
        )

    def before_load(self, state: State, logger: Logger) -> None:
        self._group.ask_coordinator()
        check_load_path()
        self._job.skip_torn()
        self._is_loading = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Composer loads checkpoints before fit_start, which builds DiLoCo. So the state is kept.
        self._group.continuation.load(state)

    def after_load(self, state: State, logger: Logger) -> None:
        self._is_loading = False
        self._group.continuation.check_loaded(state.load_path)
        self._job.averages.after_load()

    def fit_start(self, state: State, logger: Logger) -> None:
        check_algorithms(state)  # one may have been added since
        check_loads(state)
        self._job.before_join()
        try:
            self._group.join()
        finally:  # after an error too: the next fit compares the model with the checkpoint
            self._job.averages.after_join()
        # Composer may not close the Trainer: Engine.__del__ of any other Trainer unregisters the
        # closes of all of them from atexit, which compares static methods.
        self._group.leave_when_over(Trainer.fit)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        data = self._group.data
        if data is not None:
            now = state.timestamp
            data.before_batch(
                now.epoch.value,
                now.batch_in_epoch.value,
                self._job.epochs,
            )

    def batch_start(self, state: State, logger: Logger) -> None:
        self._group.begin_step()
        self._group.count(state.batch)

    def batch_end(self, state: State, logger: Logger) -> None:
        loss = state.total_loss_dict.get("loss/train/total")
        if loss is not None:
            self._job.losses.append(float(loss))
        if self._group.end_step():
            state.stop_training()

    # During a fit, evaluators run between the first two of these events; in Trainer.eval, between
    # the other two.

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self._group.show_global()

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self._group.show_local()
        self._group.note_evaluation(metrics_of(state))

    eval_standalone_start = eval_before_all

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        self._group.show_local()

    def state_dict(self) -> dict[str, Any]:
        # A collective under FSDP. Composer calls it on every rank.
        saved = self._group.state_dict()
        if not saved and self._is_loading and self._job.is_sharded:
            # Composer loads a sharded checkpoint into this.
            return self._group.continuation.layout_of().template()
        return saved

    def fit_end(self, state: State, logger: Logger) -> None:
        self._group.end()

    def close(self, state: State, logger: Logger) -> None:
        if sys.is_finalizing():
            return  # the Trainer was not closed, and the interpreter has already dismantled torch
        error = sys.exc_info()[1]
        if self.diloco is not None or error is not None:  # an error before fit_end, or after it
            end_if_stuck_in_close(error)  # other ranks may never reach Composer's barrier
        self._group.close(error)
