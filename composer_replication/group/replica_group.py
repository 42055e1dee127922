"""A trainer as one replica group, from its first fit to its last."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from composer_replication.arguments import among, check_names
from composer_replication.coordinator.membership import Membership, ask_for_run
from composer_replication.coordinator.wire_types import RunInfo
from composer_replication.data.group_data import GroupData, group_data_of
from composer_replication.data.sample_stream import digests_of_divided
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.torchft_api import as_diloco_manager
from composer_replication.group.call_watch import when_over
from composer_replication.group.checkpoint import checksums, theta_of
from composer_replication.group.continuation import Continuation
from composer_replication.group.global_weights import Generators, GlobalWeights
from composer_replication.group.host import GroupKeywords, Host, check_optimizer
from composer_replication.group.reports import Reporter, folder_of
from composer_replication.group.run_folder import (
    EVALUATION,
    ReplicaFolder,
    last_outer_step,
)
from composer_replication.group.save_folder import hold, is_remote, release
from composer_replication.options import OptionKeywords, ReplicaOptions, replica_id_of
from composer_replication.replica.factory import backend_for, connect
from composer_replication.replica.manager import ReplicaManager
from composer_replication.replica.ranks import ask_on_rank_0, broadcast, world_size
from composer_replication.settings import DiLoCoSettings, SettingKeywords

log = logging.getLogger(__name__)
package_log = logging.getLogger("composer_replication")


class ReplicaGroup:
    """One replica group of a DiLoCo run, for a trainer that calls these methods.

    Before the first fit a trainer calls ``ask_coordinator``, and gives what a checkpoint has to
    ``continuation.load``. For a fit it calls ``join``, then for each step ``begin_step``, ``count``
    and ``end_step``, and finally ``end``; or ``leave`` if the fit fails. Between two fits the group
    keeps its state, and the next fit continues from it. Every rank of the group makes each call.

    Args:
        host: The trainer.
        named: The settings and options that the user has named.
        callback: The name of the trainer's callback, for an error.
        given: The manager to use, for one fit only. None: make one for each.

    Attributes:
        settings: The run's settings.
        options: This group's options.
        diloco: DiLoCo, during a fit; else None.
        data: The samples that the group trains on, during a fit, if the loader is one of ours.
        weights: Shows the global weights, from the first fit on.
        manager: Connects with the other groups, until this one leaves.
        continuation: What a fit continues from, and what it leaves for the next.
        generators: The random generators, saved while the global weights are shown. A trainer that
            saves after an evaluation, before it goes on, has to restore them first.
        result: The result of the last fit; empty before its end.

    Raises:
        TypeError: A keyword is neither a setting nor an option.
        ValueError: A setting or an option is out of range.
    """

    def __init__(
        self,
        host: Host,
        named: GroupKeywords,
        callback: str,
        given: Any,
    ) -> None:
        check_names(named, GroupKeywords, callback)
        self.host = host
        host.group = self
        self.settings = DiLoCoSettings(**among(named, SettingKeywords))
        self.options = ReplicaOptions(**among(named, OptionKeywords)).with_environment()
        self._named = named  # a coordinator's settings are compared with what the user has named
        if package_log.level == logging.NOTSET:
            package_log.setLevel(logging.INFO)  # a trainer may set a level for its own package only
        self.diloco: DiLoCo | None = None
        self.data: GroupData | None = None
        self.weights: GlobalWeights | None = None
        self._given = given
        self.manager: Any = None
        self.result: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        """The metrics of the last evaluation, by name, which become part of the result."""
        self._run: RunInfo | None = None
        self._membership: Membership | None = None
        self._reporter = Reporter(ReplicaFolder(None, ""), self.settings, host)  # before a fit
        self.continuation = Continuation(host)
        self.generators = Generators()
        self._received: tuple[dict[str, Any], bool] | None = None
        self._has_failed_start = False
        self._parent = os.getppid()
        self._joined = ExitStack()  # what a fit has joined, to leave in the opposite order
        self._leaving = threading.RLock()  # when a fit has failed, another thread leaves

    # ---- before a fit -----------------------------------------------------------------------

    def ask_coordinator(self) -> None:
        """Take the coordinator's settings, if there is one."""
        if self.options.coordinator_addr is not None:
            self._run = ask_for_run(self.options)
            self.settings = self._run.settings
            self.options = self._run.adopt(self.options, self._named)

    def hold_folders(self) -> None:
        """Keep other groups out of the folders in which this one saves. It may be repeated.

        Rank 0 alone calls it, for instance by ``ask_on_rank_0``.

        Raises:
            ValueError: Another group saves there.
        """
        hold(
            self.host.saves_to,
            replica_id_of(self.options),
            self,
            self.host.save_argument,
        )

    @property
    def _known_step(self) -> int:
        """The outer steps of the run that the coordinator knew of when it was asked."""
        return 0 if self._run is None else self._run.outer_step

    @property
    def has_begun(self) -> bool:
        """Whether the run has made outer steps. A collective of the group's ranks."""
        return ask_on_rank_0(
            lambda: max(self._known_step, last_outer_step(self.options.run_dir)) > 0
        )

    # ---- a fit begins -----------------------------------------------------------------------

    def join(self) -> None:
        """Begin a fit: connect with the other groups, and wait for them.

        Raises:
            BadStateError: The checkpoint is damaged, or is one of another model.
            SettingsMismatch: It was saved with other fragments, or the other groups' settings
                differ.
            ValueError: A setting or the optimizer does not fit, or the fit before trained other
                parameters, or left other values of them.
        """
        if self.diloco is not None:
            self.leave()
            self._keep()
            self.continuation.left = {}
            self._drop()
            log.info("Continuing from the state of the fit that failed")
        if self._given is not None and self.continuation.ended:
            raise ValueError(
                "manager= can be used for one fit only, since it leaves the other groups after it: "
                "give the next fit a new DiLoCoCallback with a new manager"
            )
        try:
            self._prepare()
            diloco = self._connect()
            self.diloco = diloco
            diloco.counts_steps = False
            self._restore(diloco)
            self._reporter.position("joining", diloco)
            self._joined.enter_context(diloco)
            self._follow_donor()
            self._reporter.joined(diloco, self.manager, self.continuation.is_resumed)
            if self.data is not None:
                self.data.start()
            self._report("training")
        except BaseException:
            self.leave()  # the others wait for this group as long as it sends heartbeats
            release(self)
            self._has_failed_start = True
            if not self.continuation.is_resumed or self.continuation.loaded:
                self._forget_start()  # else it alone has what the checkpoint had, for the next fit
            raise
        self._has_failed_start = False

    def forget_failed_start(self) -> None:
        """Have the next fit not continue from what one that did not start has loaded."""
        self.continuation.load({})
        if self._has_failed_start:
            self._forget_start()

    def _forget_start(self) -> None:
        self._drop()
        self._received = None

    def _prepare(self) -> None:
        """Check what this group brings along, before it contacts any other."""
        check_optimizer(self.host.optimizer)
        ask_on_rank_0(self.hold_folders)
        self._joined.callback(self.host.averages.leave)
        self.continuation.begin()
        self._reporter = Reporter(folder_of(self.options), self.settings, self.host)
        self._reporter.settings("" if self._run is None else self._run.settings_source)

    def _restore(self, diloco: DiLoCo) -> None:
        """Continue where a checkpoint or the fit before ended."""
        reading = self.continuation.restore(diloco)
        if self.data is not None and reading:
            self.data.load_state_dict(reading)
        if self.weights is not None:
            self.weights.remove()
        theta = diloco.global_parameters()
        self.weights = GlobalWeights(self.host.model, theta, self.host.averages)

    def _connect(self) -> DiLoCo:
        host = self.host
        options = self.options
        refusal = self.continuation.start_refusal(options.run_dir, self._known_step)
        if self._run is not None:
            synced = self.continuation.layout.fragments
            self._membership = Membership(options, self._run, synced, world_size())
            self._joined.callback(self._membership.leave)
        backend = backend_for(next(host.model.parameters()).device, options.backend)
        given = self._given or connect(replace(options, backend=backend))
        manager: Any = as_diloco_manager(given)
        self.manager = manager
        self._joined.callback(manager.shutdown)
        if isinstance(manager, ReplicaManager):
            manager.member.own.saves_to = tuple(filter(is_remote, host.saves_to))
            generators = Generators()
            generators.save()
            manager.member.own.data = digests_of_divided()
            generators.restore()
        manager.register_state_dict_fn(host.name, self._receive, self._position)
        diloco = DiLoCo(
            manager,
            host.model,
            host.optimizer,
            settings=self.settings,
            options=options,
            start_refusal=refusal,
            ranks=dist.group.WORLD if world_size() > 1 else None,
            also_synced=self.continuation.layout.live,
        )
        self.data = group_data_of(
            host.loader,
            options,
            diloco,
            self._membership,
            self.sync_idle,
            host.epochs,
        )
        if self.data is not None:
            self._joined.callback(self.data.close)
        return diloco

    def _position(self) -> dict[str, Any]:
        return self.host.state_dict() | {"sync_every": self.settings.sync_every}

    def _receive(self, position: dict[str, Any]) -> None:
        """Keep a donor's position. torchft calls it inside ``start_quorum``."""
        self._received = position, self.is_in_step

    def _follow_donor(self) -> None:
        """If a sync has healed this group, continue at the position of rank 0's donor.

        torchft picks a donor for each rank, and donors may be at other steps. Where groups take
        unequal numbers of steps, one that has trained keeps its own count: each trains its own.
        """
        if self._received is None:  # on all ranks alike, and seldom: no collective else
            return
        position, is_in_step = broadcast(self._received)
        self._received = None
        is_equal = position.pop("sync_every") == self.settings.sync_every
        if not self.host.steps or (is_equal and self.settings.round_seconds is None):
            self.host.load_state_dict(position, is_in_step)

    # ---- steps ------------------------------------------------------------------------------

    def note_progress(self) -> None:
        """Note that training is alive. It is cheap enough for every event of a trainer."""
        if self.diloco is not None:
            self.diloco.hang_watch.note_progress()

    def begin_step(self) -> None:
        """Count the optimizer's steps as inner steps from now on, until ``end_step``.

        Others do not count: torch's get_optimizer_state_dict and set_optimizer_state_dict call
        ``step``, at a load and, for SGD, at every save.
        """
        if self.diloco is None:
            return
        if self.data is not None:
            self.diloco.ledger.position = self.data.position.samples
        self.diloco.counts_steps = True
        if self.host.last_step() == self.host.steps + 1:
            self.diloco.expect_last_step()

    def count(self, batch: Any) -> None:
        """Count a batch of this rank for the step that has begun.

        Raises:
            ValueError: On all ranks, if the batch of one has no tokens and these are counted.
        """
        if self.diloco is None:
            return
        self.diloco.note_batch(batch)
        if self.settings.weight_by == "samples":
            self.diloco.count_samples(self.host.size_of_all(batch, "samples"))
        elif self.settings.weight_by == "tokens":
            self.diloco.count_tokens(self.host.size_of_all(batch, "tokens"))

    def end_step(self) -> bool:
        """End a step, also one in which the optimizer was not called because of an overflow.

        Returns:
            Whether to end training, since the run's folder says so.

        Raises:
            RuntimeError: The launcher has died.
        """
        if self.diloco is None:
            return False
        self.diloco.counts_steps = False
        self.diloco.forget_counted()
        if self.data is not None:
            self.data.after_batch()
        # A rank that outlives its launcher would vote in the name of the group that is started
        # again.
        if os.getppid() != self._parent and world_size() > 1:
            raise RuntimeError(
                "the launcher of this group's ranks has died, so this rank ends. Start the group "
                "again: it takes over the other groups' state"
            )
        if not self._report("training") or not broadcast(self._reporter.folder.asks_to_stop):
            return False
        log.info(
            "Ending after outer step %d: the run's folder contains STOP", self.diloco.outer_step
        )
        return True

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun that has not ended."""
        return self.diloco is not None and self.diloco.counts_steps

    def sync_idle(self) -> None:
        """Take part in the others' next sync: there are no samples to train on at the moment."""
        assert self.diloco is not None, "it is asked while training"
        with self.host.averages.out_of_the_model():
            self.diloco.sync_idle()
        if not self._report("training") and self.data is not None:
            self.data.after_sync()

    def _report(self, phase: str) -> bool:
        """Report syncs and the position in training. Returns whether there was a sync."""
        assert self.diloco is not None, "join has made it"
        reports = self.diloco.pop_finished_syncs()
        self._follow_donor()
        if reports:
            if self._membership is not None:
                self._membership.check()
            self._reporter.synced(reports, self.manager)
        if reports or self._reporter.is_due(phase):
            done = 0.0 if self.data is None else self.data.done(self.host.epochs)
            position = self._reporter.position(phase, self.diloco, done)
            if self._membership is not None:
                self._membership.report_progress(position)
        if reports and self.data is not None:
            self.data.after_sync()
        return bool(reports)

    # ---- weights ----------------------------------------------------------------------------

    def show_global(self) -> None:
        """Put the global weights into the model, for evaluators. It may be repeated.

        Iterating over a loader draws from torch's generator: without saving the generators, an
        evaluation would change the dropout of the steps after it.
        """
        if self.weights is None:
            return
        if self.diloco is not None:
            self._report("evaluating")
        self.generators.save()
        if self.options.eval_weights == "global" and not self.host.averages.are_evaluated:
            self.weights.show()

    def show_local(self) -> None:
        """Put the local weights and the random generators back. It may be repeated."""
        if self.weights is not None:
            self.weights.hide()
            self.generators.restore()

    def note_evaluation(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of an evaluation for the run's folder and the result."""
        self._metrics = metrics
        self._reporter.folder.append(EVALUATION, {"batch": self.host.steps, "eval": metrics})
        if self.result and self.diloco is None:
            # A trainer's last evaluation may come after the end of the fit.
            self.result["eval"] = metrics
            self._reporter.folder.write_end(self.result)

    def state_dict(self) -> dict[str, Any]:
        """This group's part of a checkpoint: empty before training. Under FSDP a collective.

        It has to be written before the next inner step. The checkpoint's model is the global one:
        ``state_dict`` of the model returns the global weights.
        """
        state = self.continuation.ended
        if self.diloco is not None:
            state = self._diloco_state(self.diloco)
        if not state or self.weights is None or self.continuation.loaded:
            return self.continuation.loaded
        local = self.host.averages.local(self.weights.local())
        return self.continuation.layout.pack(state, local, self.weights.saved)

    def _diloco_state(self, diloco: DiLoCo) -> dict[str, Any]:
        """DiLoCo's state with its own tensors, valid until the next inner step."""
        state = diloco.state_dict(copies=False)
        if self.data is not None:
            state["reading"] |= self.data.state_dict()
        return state

    # ---- a fit ends -------------------------------------------------------------------------

    def end(self) -> None:
        """End a fit without an error: sync the last inner steps, and leave the others."""
        if self.diloco is None:
            return
        with self.host.averages.out_of_the_model():
            if self.options.final_sync:
                self.diloco.final_sync()
            self.continuation.left = checksums(self.continuation.layout.live)
        self._report("evaluating")
        self.result = self._reporter.result(self.diloco) | {"eval": self._metrics}
        if self.data is not None:
            self.data.end()
        self._keep()
        self._drop()
        self._reporter.folder.write_end(self.result)
        if self.result["failure"]:
            log.error("%s", self.result["failure"])
        log.info(
            "Ended after %(outer_steps)d outer steps: global parameters %(global_digest).8s",
            self.result,
        )

    def _keep(self) -> None:
        """Keep what the fit has left, for the next one."""
        assert self.diloco is not None and self.weights is not None, "join has made them"
        state = self._diloco_state(self.diloco)
        self.continuation.ended = state
        # Under DDP these have been gathered, so rank 0 alone may save the model from now on.
        self.weights.theta = theta_of(state["fragments"])

    def leave(self) -> None:
        """Count no more steps and send no more heartbeats: the others would wait for this group.

        The DiLoCo and the data stay: a later fit may continue from them.
        """
        if sys.is_finalizing():
            return  # the threads have ended: no heartbeats are sent, and a wait would never return
        with self._leaving:
            self._joined.close()
            self.manager = None
            self._membership = None

    def leave_when_over(self, function: Callable[..., object]) -> None:
        """Leave when the call of a function that calls this has ended, if no event says so."""
        manager = self.manager

        def leave_after_error() -> None:  # on another thread, perhaps in the next fit
            with self._leaving:
                if self.manager is manager:
                    self.fail()

        self._joined.callback(when_over(function, leave_after_error))

    def fail(self, error: BaseException | None = None) -> None:
        """Leave because the fit has ended with an error; a later fit may continue."""
        release(self)
        if self.diloco is None:
            return
        self._reporter.folder.write_error(error)
        self.leave()
        log.warning(
            "This replica group has left: its fit ended with an error. The others continue, and it "
            "joins them again if fit is called again"
        )

    def _drop(self) -> None:
        self.leave()
        self.diloco = None
        self.data = None

    def close(self, error: BaseException | None = None) -> None:
        """Leave for good, when the trainer closes. It may be repeated.

        Args:
            error: The error that ends the training; None if there is none.
        """
        self._reporter.folder.write_error(error)
        self._drop()
        release(self)
        if self.weights is not None:
            self.weights.remove()


class ShowsGroup:
    """What the callback of any trainer shows of its replica group."""

    _group: ReplicaGroup

    @property
    def settings(self) -> DiLoCoSettings:
        """The run's settings; the coordinator's, once it has been asked."""
        return self._group.settings

    @property
    def options(self) -> ReplicaOptions:
        """This group's options."""
        return self._group.options

    @property
    def diloco(self) -> DiLoCo | None:
        """DiLoCo, during a training; else None."""
        return self._group.diloco

    @property
    def result(self) -> dict[str, Any]:
        """The result of the last training; empty before its end."""
        return self._group.result
