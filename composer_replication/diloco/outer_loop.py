"""The outer loop of one replica group: sync until it commits, report it, end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.hang_watch import HangWatch
from composer_replication.diloco.inner_optimizer import clear_state
from composer_replication.diloco.options import DiLoCoArguments
from composer_replication.diloco.peer_table import PeerTable
from composer_replication.diloco.retries import SyncError, SyncRetries
from composer_replication.diloco.round_length import RoundLength
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.sync_clock import SyncClock, SyncSeconds
from composer_replication.diloco.sync_report import SyncReport
from composer_replication.diloco.torchft_api import (
    HEAL_STATE,
    DiLoCoManager,
    longest_wait_s,
    serve_state,
)
from composer_replication.diloco.turns import Turns

log = logging.getLogger(__name__)


class OuterLoop:
    """Runs the syncs of all fragments, turn by turn.

    Args:
        manager: The torchft manager, or its simulated double.
        global_parameters: Those of each fragment, in the order of their turns.
        state: The global state of all fragments.
        settings: The run's settings.
        arguments: What ``DiLoCo`` was built with.
        hang_watch: Allows a sync the time for which it may wait for others.

    Attributes:
        fragments: The fragments in the order of their turns.
        round_length: The inner steps of this group's turns.
        turns: What is sent in a quorum, and what its vote ends.
        clock: The clock that the fragments report quorums and votes to.
        peer_table: The table that the fragments send.
        inner_steps: Inner steps of this group since the run began.
        reports: The syncs that nobody has asked for yet.
        ends_with_next_step: Whether the next inner step is the last one.
        has_healed: Whether this group has taken over the global state since its last report.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        global_parameters: Sequence[GlobalParameters],
        state: GlobalState,
        settings: DiLoCoSettings,
        arguments: DiLoCoArguments,
        hang_watch: HangWatch,
    ) -> None:
        self.manager = manager
        self.state = state
        self._settings = settings
        self._inner_optimizer = arguments.inner_optimizer
        self._digest_every = arguments.digest_every
        self._give_up_after_s = arguments.give_up_after_s
        self.clock = SyncClock(hang_watch, longest_wait_s(manager))
        self.fragments: list[FragmentSync] = []
        self.round_length = RoundLength(settings)
        self.peer_table = PeerTable(manager, state, self.fragments, arguments.digest_every)
        device = arguments.message_device
        self.fragments += (
            FragmentSync(
                manager,
                index,
                globals_,
                arguments.inner_optimizer,
                settings,
                self.clock,
                state,
                self.peer_table,
                None if device is None else torch.device(device),
            )
            for index, globals_ in enumerate(global_parameters)
        )
        self.turns = Turns(
            manager, self.fragments, state, self.clock, settings.turns_in_flight, self.settle
        )
        self._sick_in_a_row = self._steps_lost = self._synced_at = 0
        self._is_idle = self._must_settle = False
        self.inner_steps = 0
        self.reports: list[SyncReport] = []
        self.ends_with_next_step = self.has_healed = False
        manager.register_state_dict_fn(HEAL_STATE, self._heal, self._state_for_joiner)
        serve_state(manager, state)

    def resume(self, inner_steps: int, round_length: Mapping[str, Any] | None) -> None:
        """Continue the counts of a checkpoint.

        Args:
            inner_steps: Inner steps of this group until then.
            round_length: The ``RoundLength`` of then; None if the checkpoint has none.
        """
        self.inner_steps = self._synced_at = inner_steps
        if round_length is not None:
            self.round_length.load_state_dict(round_length)
            self.peer_table.step_s = self.round_length.step_s

    # ---- a sync -----------------------------------------------------------------------------

    def count_inner_step(self, samples: int) -> None:
        """Count a completed inner step, of so many samples or tokens."""
        self.inner_steps += 1
        self.peer_table.is_over = False
        self.peer_table.is_training = not self.ends_with_next_step
        for fragment in self.fragments:
            fragment.unsynced.count(samples)

    def send(self) -> None:
        """Begin a turn: compute the next fragment's pseudo-gradient and send it."""
        self.turns.before_quorum()
        self.manager.start_quorum()
        self.turns.prepare_sync()

    def sync(self) -> None:
        """Run one turn from quorum to vote, and retry it until it commits."""
        with self.clock.blocking():
            self.turns.before_quorum()
            self.manager.start_quorum()
            self.sync_in_quorum()
            self.finish_sync()

    def sync_in_quorum(self) -> None:
        """Make one attempt at a turn: send, wait for the mean, vote, and step if it commits."""
        self.turns.prepare_sync()
        self.turns.perform_sync()

    def finish_sync(self) -> None:
        """Retry the turn until it commits, then report its sync.

        Raises:
            SyncError: Too many attempts in a row have failed, see ``SyncRetries``.
        """
        retries = SyncRetries(
            self.manager, self.state, self._settings.max_sync_retries, self._give_up_after_s
        )
        while self.turns.has_failed:
            retries.wait()
            self.manager.start_quorum()
            retries.check_limit(self.fragments[0].is_joining)
            # If a peer has committed the sync, this quorum has healed this group, and the next
            # fragment has its turn.
            self.sync_in_quorum()
        if self.fragments[0].is_joining and self.peer_table.are_all_joining:
            self.turns.take_back(has_healed=self.has_healed)
            self.clock.read()
            self._synced_at = self.inner_steps
        elif (fragment := self.turns.end()) is not None:
            self._account(fragment, retries.count)

    def _account(self, fragment: FragmentSync, retries: int) -> None:
        moved = fragment.total_contribution > 0
        counts = moved or self.turns.turns_in_flight > 0  # those in flight have the next turns
        if counts and not moved:
            self.state.begin_outer_step()
        if counts:  # ends what FragmentSync._set_grads has begun
            self.state.end_outer_step(self.peer_table.synced_samples)
        else:
            self.turns.set_torchft_step()
        if fragment.mean.is_finite:
            fragment.discard_synced_steps()
            self._sick_in_a_row = 0
        else:
            self._recover()
        seconds, vitals = self.clock.read(), self.peer_table.vitals
        self._choose_round_length(seconds)
        self._synced_at = self.inner_steps
        is_idle = self._is_idle or not self.peer_table.is_training
        if not moved and (fragment.is_joining or is_idle):
            return  # a cold start, a resume of all groups, or an end: no outer step to report
        report = SyncReport.of(
            fragment,
            self.state,
            vitals,
            seconds,
            has_digest=self._digest_every > 0 and self.state.outer_step % self._digest_every == 0,
            num_participants=self.manager.num_participants(),
            inner_steps=self.inner_steps,
            sync_every=self.round_length.steps_in_turn(self.settings) * len(self.fragments),
            steps_lost=self._steps_lost,
            retries=retries,
            healed=self.has_healed,
        )
        self.reports.append(report)
        self.has_healed = False
        self._steps_lost = 0

    def _choose_round_length(self, seconds: SyncSeconds) -> None:
        """Choose the inner steps of the next turn by the time that those of this one took."""
        if self._settings.round_seconds is None:
            return
        if steps := self.inner_steps - self._synced_at:
            (own,) = self.fragments[0].globals.mean_over_ranks(seconds.trained / steps)
            self.round_length.measure(own)
        self.peer_table.step_s = self.round_length.step_s
        self.round_length.choose(self.settings, self.peer_table.vitals)

    @property
    def settings(self) -> DiLoCoSettings:
        """The settings, with the ``sync_every`` that is in force; see ``DiLoCoSettings.at``."""
        return self._settings.at(self.state.outer_step)

    # ---- what training does not keep --------------------------------------------------------

    def _recover(self) -> None:
        """Continue from the global parameters, after a pseudo-gradient that was not finite.

        Raises:
            SyncError: More than ``max_sync_retries`` syncs in a row had such a pseudo-gradient.
        """
        self._sick_in_a_row += 1
        if self._sick_in_a_row > self._settings.max_sync_retries:
            raise SyncError(
                f"this group's pseudo-gradient was not finite in {self._sick_in_a_row} syncs in a "
                f"row, the last one outer step {self.state.outer_step}: it leaves, and the others "
                "continue. Check its data, its learning rate and its hardware"
            )
        log.warning(
            "This group's pseudo-gradient is not finite at outer step %d: it contributed nothing; "
            "the group continues from the global parameters with a fresh inner optimizer state",
            self.state.outer_step,
        )
        self._drop_local()
        clear_state(self._inner_optimizer)

    def _drop_local(self) -> None:
        """Continue from the global parameters, without what was trained since the last syncs."""
        self._steps_lost += max(fragment.unsynced.inner_steps for fragment in self.fragments)
        self._synced_at = self.inner_steps
        for fragment in self.fragments:
            fragment.take_global()
        self.state.ledger.stop_reading()

    def _state_for_joiner(self) -> dict[str, Any]:
        """Return the state that a joiner takes over. torchft calls it in a donor's quorum.

        Without copies: nothing in it changes before the vote, and copies of a large model would
        take seconds for which all groups wait.
        """
        self.state.compare_next = True
        return self.state.state_dict(copies=False)

    def _heal(self, state: dict[str, Any]) -> None:
        """Take over a donor's global state. torchft calls it inside ``start_quorum``."""
        self.state.take_over(state, "the replica groups in training")
        log.info("Took over the global state after outer step %d", self.state.outer_step)
        self.turns.drop()
        self._steps_lost += max(fragment.unsynced.inner_steps for fragment in self.fragments)
        for fragment in self.fragments:
            fragment.forget_local()
        self._synced_at = self.inner_steps
        self.has_healed = self._must_settle = True
        if not self.fragments[0].globals.has_ranks:
            self.settle()

    def settle(self) -> None:
        """Continue from the global parameters of a heal, once all ranks of the group have healed.

        A heal runs on torchft's thread, where no collective may run, and may fail on one rank
        alone, for which the others would wait. So all ranks call this at each sync.
        """
        (have_healed,) = self.fragments[0].globals.mean_over_ranks(self._must_settle)
        if have_healed < 1:
            return
        self._must_settle = False
        for fragment in self.fragments:
            fragment.take_global()
        self.state.ledger.stop_reading()

    # ---- without inner steps ----------------------------------------------------------------

    def finish(self) -> None:
        """Sync until no group has anything to send, and end on the global parameters.

        Groups that have ended take part in the syncs of those that still train, and contribute
        nothing.
        """
        self._land()
        self.peer_table.is_training = False
        is_alone = self.manager.num_participants() == 1
        while not self.peer_table.is_over:
            if is_alone and not any(fragment.unsynced.has_more for fragment in self.fragments):
                break
            self.sync()
        if self.turns.in_flight:  # to which nobody has contributed anything
            self.turns.drop()
            self.turns.set_torchft_step()
        self.peer_table.is_training, self.ends_with_next_step = True, False
        for fragment in self.fragments:
            fragment.take_global()

    def sync_idle(self) -> None:
        """Take part in the others' next sync, with the inner steps since the last one.

        For a group that has no samples to train on at the moment, and may get some. Without it the
        others could end the run, or this group would fall behind and be healed.
        """
        self._land()
        self.peer_table.is_training = self._is_idle = True
        try:
            self.sync()
        finally:
            self._is_idle = False

    def _land(self) -> None:
        """Finish the turn that has begun, if one has."""
        if self.turns.is_open:
            with self.clock.blocking():
                self.turns.perform_sync()
                self.finish_sync()
