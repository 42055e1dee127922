"""The outer loop of one replica group: sync until it commits, report it, end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from composer_replication.diloco.equal_samples import FirstBatches
from composer_replication.diloco.fragment_sync import FragmentSync, Phase
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.hang_watch import HangWatch, SyncClock, SyncSeconds
from composer_replication.diloco.outer_health import UsualPace, learning_rate
from composer_replication.diloco.peer_rows import PeerRow
from composer_replication.diloco.peer_table import TableResult
from composer_replication.diloco.retry import SyncError, SyncRetries
from composer_replication.diloco.round_length import RoundLength
from composer_replication.diloco.sync_report import SyncReport, report_of
from composer_replication.diloco.torchft_api import HEAL_STATE, DiLoCoManager
from composer_replication.options import ReplicaOptions

log = logging.getLogger(__name__)


class Role(Enum):
    """What a group does in a sync."""

    TRAINS = "it has inner steps, and takes more"
    ENDS = "it takes no more inner steps"
    IDLES = "it has no samples at the moment, and may get some"
    JOINS = "it obtains the global state, and contributes nothing"


class OuterLoop:
    """Runs the syncs of all fragments, one at a time.

    ``send`` begins a sync of the schedule, and ``end_sync`` ends it. The other syncs have no inner
    steps in between: those of a join, of a group without samples, and of the end.

    Args:
        manager: The torchft manager, or its simulated double.
        state: The global state of all fragments.
        options: This group's options, as ``options``.
        inner_optimizers: Train the model; the steps of the first one are counted.
        hang_watch: Allows a sync the time for which it may wait for others.

    Attributes:
        fragments: The fragments in the order of their syncs.
        round_length: How many inner steps this group takes between two syncs.
        clock: Measures what a sync costs training.
        result: What the groups of the last sync have reported to each other.
        usual_pace: How far this group's inner steps usually move a parameter.
        first_batches: Compared with the other groups' at this group's first sync.
        role: This group's in the sync, or in the next one of the schedule.
        inner_steps: Inner steps of this group since the run began.
        steps_left: Inner steps until the next outer step.
        reports: The reports that ``DiLoCo.pop_finished_syncs`` has not returned yet.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        state: GlobalState,
        options: ReplicaOptions,
        inner_optimizers: Sequence[torch.optim.Optimizer],
        hang_watch: HangWatch,
    ) -> None:
        self.manager = manager
        self.state = state
        self.options = options
        self._inner_optimizers = inner_optimizers
        self.clock = SyncClock(hang_watch, manager.longest_wait_s)
        manager.watch_waits(hang_watch.note_progress)
        self.round_length = RoundLength(state.settings)
        self.result = TableResult()
        self.usual_pace = UsualPace(len(state.fragments))
        self.first_batches = FirstBatches()
        self.role = Role.TRAINS
        self.fragments = [
            FragmentSync(manager, index, state, self.usual_pace)
            for index in range(len(state.fragments))
        ]
        self._steps_lost = 0
        self._steps_since_sync = 0
        self._has_unfinished_heal = False
        self.inner_steps = 0
        self.steps_left = self.steps_before_sync
        self.reports: list[SyncReport] = []
        try:
            manager.register_state_dict_fn(HEAL_STATE, self._heal, self._state_for_joiner)
        except (AssertionError, ValueError) as error:  # torchft's, and the simulation's
            raise ValueError(
                "this manager has a DiLoCo already: use one for all models and optimizers, "
                "DiLoCo(manager, nn.ModuleList(models), optimizers)"
            ) from error
        manager.serve_state(state)

    # ---- a sync -----------------------------------------------------------------------------

    @property
    def in_flight(self) -> FragmentSync | None:
        """The fragment whose sync has begun and has not ended; None if there is none."""
        begun = (each for each in self.fragments if each.phase is not Phase.IDLE)
        return next(begun, None)

    def count_inner_step(self, samples: int) -> None:
        """Count a completed inner step and its samples or tokens."""
        self.inner_steps += 1
        self.steps_left -= 1
        self._steps_since_sync += 1
        rate = learning_rate(*self._inner_optimizers)
        for fragment in self.fragments:
            fragment.unsynced.count(samples, rate)

    def count_other_steps(self) -> None:
        """Have the next sync send fragments without inner steps too, if others have moved them.

        What they did in a sync in flight may have been thrown away. A collective of the ranks.
        """
        for fragment in self.fragments:
            globals_ = fragment.globals
            (has_moved,) = globals_.mean_over_ranks(globals_.has_moved())
            if has_moved and not fragment.unsynced.inner_steps:
                fragment.unsynced.count(1, learning_rate(*self._inner_optimizers))

    def prepare_sync(self) -> None:
        """Send the next fragment, in a quorum. It waits for the ranks of this group only.

        The outer step decides which fragment is next, and not the manager's step as in torchft: a
        join commits, but is no outer step.
        """
        self.clock.quorum_formed()
        try:
            agrees = self.finish_heal()
            next_one = self.fragments[self.state.outer_step % len(self.fragments)]
            fragment = self.in_flight or next_one
            if not agrees and not self.manager.errored():
                # The peers of this rank need not wait for what it will not send.
                self.manager.report_error(
                    ConnectionError("another rank of this group has not healed")
                )
            present = self.manager.num_participants()
            if not agrees or present < self.manager._min_replica_size:
                # The vote will fail. Groups that wait for others would send all their parameters at
                # each attempt. All ranks and groups see this number, so all decide alike.
                fragment.abandon()
                return
            has_more = self.role is not Role.ENDS or self._leaves_steps(fragment)
            fragment.pack(is_joining=self.role is Role.JOINS)
            fragment.send(self._row(fragment, has_more))
        except BaseException as error:  # Ctrl-C too: peers would wait until their timeout
            self.manager.report_error(error)
            raise

    def _row(self, fragment: FragmentSync, has_more: bool) -> PeerRow:
        """What this group reports to the others beside its message."""
        metrics = fragment.metrics(self.round_length.step_s)
        return PeerRow(
            has_more=has_more,
            is_joining=fragment.is_joining,
            was_healed=self.state.was_healed,
            outer_step=self.state.outer_step,
            metrics=metrics,
            samples=self.state.ledger.send(
                fragment.fragment_id, fragment.packed.position, metrics.contribution > 0
            ),
            batches=self.first_batches.number() if metrics.contribution else 0,
            digests=self.state.digests_to_compare(self.options.digest_every),
        )

    def _leaves_steps(self, fragment: FragmentSync) -> bool:
        """Whether inner steps remain to be sent after this fragment, which is sent next."""
        steps = [each.unsynced.inner_steps for each in self.fragments]
        sent = fragment.unsent or fragment.unsynced
        steps[fragment.fragment_id] -= sent.inner_steps
        return any(steps)

    def perform_sync(self) -> FragmentSync:
        """Wait for the mean, vote, and on commit take the outer step. Returns the fragment."""
        fragment = self.in_flight
        assert fragment is not None, "it was prepared"
        fragment.perform_sync()
        self.result = fragment.result
        self.clock.vote_over()
        return fragment

    def send(self) -> None:
        """Ask for a quorum, and send the next fragment."""
        self.manager.start_quorum()
        self.prepare_sync()

    def end_sync(self) -> None:
        """End the sync that ``send`` has begun. One that a resume came too late for is sent now."""
        if any(each.phase is Phase.RESTORED for each in self.fragments):
            self.send()
        self.finish_sync(self.perform_sync())

    def sync(self, role: Role) -> None:
        """Run one sync from quorum to vote, and retry it until it commits."""
        self.role = role
        try:
            with self.clock.blocking():
                self.send()
                self.end_sync()
        finally:  # whoever goes on after an error trains
            self.role = Role.TRAINS

    def finish_sync(self, fragment: FragmentSync) -> None:
        """Retry the sync until it commits, then report it.

        Args:
            fragment: The one of the first attempt. After a heal the next one is synchronised.

        Raises:
            SyncError: Too many attempts in a row have failed, see ``SyncRetries``.
        """
        retries = SyncRetries(self.manager, self.state, self.options.give_up_after_s)
        while fragment.phase is not Phase.COMMITTED:
            fragment = self._retry(retries)
        self.manager.asks_to_gather = False
        fragment.end()
        self.set_torchft_step()
        if self.result.are_all_joining:
            # Nobody has sent anything. What this group's checkpoint had in flight is still to be
            # sent, unless the group has taken over the state of another one: it has dropped it.
            self.clock.read()
        else:
            self._account(fragment, retries.count)
            self.steps_left = self.steps_before_sync
            if self.role in (Role.JOINS, Role.IDLES):
                # The others take this outer step after the delay: this puts the next one at the
                # same time in all groups.
                self.steps_left += self.state.settings.fragment_sync_delay
        self._steps_since_sync = 0
        self.role = Role.TRAINS

    def _retry(self, retries: SyncRetries) -> FragmentSync:
        """Make another attempt at a sync, in another quorum."""
        manager = self.manager
        present = manager.num_participants()
        result = self.result
        ranks = self.fragments[0].globals
        was_last, has_doubts = ranks.mean_over_ranks(result.is_over, result.has_doubts)
        retries.form_quorum(self.role is Role.JOINS, has_doubts > 0)
        if was_last and manager.num_participants() < present:
            log.warning(
                "Groups have left since the run's last sync, in which this group's vote failed: if "
                "they have committed it, this group ends with other global parameters than they. "
                "Compare the digests, and use the weights of a group that has ended first"
            )
        # If a peer has committed the sync, this quorum has healed this group, and the next fragment
        # is sent.
        self.prepare_sync()
        return self.perform_sync()

    def set_torchft_step(self) -> None:
        """Set torchft's step to that of the next sync. After an outer step it is that already.

        torchft counts commits, and the groups with the highest count heal the others. A join, a
        start and an end also commit. Without this call, groups that wait for others to resume would
        count these commits, and would heal a group that comes with a newer checkpoint. The + 1 is
        for the cold start: torchft takes a group at step 0 for one without a state.
        """
        step = self.state.outer_step + 1
        self.manager.load_state_dict(self.manager.state_dict() | {"step": step})

    def _account(self, fragment: FragmentSync, retries: int) -> None:
        moved = fragment.total_contribution > 0
        is_left_out = self.manager.participating_rank() in self.result.left_out
        if fragment.mean.is_finite and not is_left_out:
            fragment.discard_synced_steps()
            fragment.unsound_in_a_row = 0
        else:
            self._recover(fragment)
        seconds = self.clock.read()
        self._choose_round_length(seconds)
        # A cold start, a resume of all groups and an end make no outer step. There is nothing to
        # report of them, but for the steps that the run's last sync drops.
        drops_steps = self.role is not Role.JOINS and self._steps_lost > 0
        if not (moved or self.role is Role.TRAINS or drops_steps):
            return
        has_digest = self.state.digest_is_due(self.options.digest_every)
        report = report_of(
            fragment,
            seconds,
            outer_step=self.state.outer_step,
            num_participants=self.manager.num_participants(),
            inner_steps=self.inner_steps,
            sync_every=self.steps_before_sync * len(self.fragments),
            steps_lost=self._steps_lost,
            retries=retries,
            healed=self.state.was_healed,
            global_digest=self.state.digest() if has_digest else None,
        )
        self.reports.append(report)
        if fragment.mean.contribution:
            self.first_batches.were_compared()
        self.state.was_healed = False
        self._steps_lost = 0

    def _choose_round_length(self, seconds: SyncSeconds) -> None:
        """Choose the number of inner steps before the next sync, from the time of the last ones."""
        if self.state.settings.round_seconds is None:
            return
        steps = self._steps_since_sync
        if steps:
            (own,) = self.fragments[0].globals.mean_over_ranks(seconds.trained / steps)
            self.round_length.measure(own)
        self.round_length.choose(self.result.metrics)

    @property
    def steps_before_sync(self) -> int:
        """Inner steps that this group takes between the last sync and the next one."""
        return self.round_length.steps_before(self.state.outer_step + 1)

    # ---- what is dropped: after an unsound pseudo-gradient, and after a heal -----------------

    def _recover(self, fragment: FragmentSync) -> None:
        """Continue from the global parameters, after a sync without this group's pseudo-gradient.

        What is not finite is in the whole model after an inner step. What was far longer than all
        others, or not what the others have received, concerns its fragment alone.

        Raises:
            SyncError: More than ``max_sync_retries`` syncs of the fragment in a row had such a
                pseudo-gradient; one that is not finite counts for every fragment.
        """
        is_finite = fragment.mean.is_finite
        sick = [fragment] if is_finite else self.fragments
        concerns_all = len(sick) == len(self.fragments)
        for each in sick:
            each.unsound_in_a_row += 1
        if fragment.unsound_in_a_row > self.state.settings.max_sync_retries:
            raise SyncError(
                f"this group's pseudo-gradient was not sound in {fragment.unsound_in_a_row} syncs "
                f"in a row, the last one outer step {self.state.outer_step}: it leaves, and the "
                "others continue. Check its data, its learning rate and its hardware"
            )
        log.warning(
            "This group's pseudo-gradient %s at outer step %d: it contributed nothing; "
            "the group continues from the global parameters%s with a fresh inner optimizer state",
            "was left out" if is_finite else "is not finite",
            self.state.outer_step,
            "" if concerns_all else f" of fragment {fragment.fragment_id}",
        )
        self._forget_local(sick)
        self._take_global(sick)
        for optimizer in self._inner_optimizers:
            _clear_state(optimizer, sick)

    def _forget_local(self, fragments: Sequence[FragmentSync]) -> None:
        """What was trained here since the last syncs of these fragments is lost."""
        self._steps_lost += max(fragment.unsynced.inner_steps for fragment in fragments)
        self._steps_since_sync = 0
        for fragment in fragments:
            fragment.forget_local()

    def _take_global(self, fragments: Sequence[FragmentSync]) -> None:
        """Continue from the global parameters. With shares a collective of the group's ranks."""
        for fragment in fragments:
            fragment.globals.write_back()
        self.state.ledger.stop_reading()

    def _state_for_joiner(self) -> dict[str, Any]:
        """Return the state that a joiner takes over. torchft calls it in a donor's quorum.

        Without copies: nothing in it changes before the vote, and copies of a large model would
        take seconds for which all groups wait.
        """
        self.state.compare_next = True
        return self.state.state_dict()

    def _heal(self, state: dict[str, Any]) -> None:
        """Take over a donor's global state. torchft calls it inside ``start_quorum``."""
        self.state.take_over(state, "the replica groups in training")
        log.info("Took over the global state after outer step %d", self.state.outer_step)
        if self.in_flight is not None:  # the others have committed it without this group
            self.in_flight.abandon()
        self._forget_local(self.fragments)
        self._has_unfinished_heal = True

    def finish_heal(self) -> bool:
        """Continue from the global parameters of a heal, once all ranks of the group have healed.

        torchft applies a heal inside ``start_quorum``. It may fail on one rank alone, and the other
        ranks would then wait in a collective for it. So all ranks call this at each sync.

        Returns:
            Whether all ranks hold the same. If not, they may be at different fragments.
        """
        (have_healed,) = self.fragments[0].globals.mean_over_ranks(self._has_unfinished_heal)
        if have_healed == 1:
            self._has_unfinished_heal = False
            self._take_global(self.fragments)
        return have_healed in (0, 1)

    # ---- without inner steps ----------------------------------------------------------------

    def finish(self) -> None:
        """Sync until no group has anything to send, and end on the global parameters.

        Groups that have ended take part in the syncs of those that still train, and contribute
        nothing.
        """
        while self._steps_since_sync or not self.result.is_over:
            is_alone = self.manager.num_participants() == 1  # one may have joined meanwhile
            if is_alone and not any(fragment.unsynced.inner_steps for fragment in self.fragments):
                break
            self.sync(Role.ENDS)
        self.steps_left = self.steps_before_sync
        for fragment in self.fragments:
            fragment.forget_local()
            fragment.globals.write_back()

    def end_sync_early(self) -> None:
        """End the sync in flight, if there is one."""
        if self.in_flight is not None:
            with self.clock.blocking():
                self.end_sync()


def _clear_state(optimizer: torch.optim.Optimizer, sick: Sequence[FragmentSync]) -> None:
    """Reset the inner optimizer's state: moments, and the perturbation that SAM would undo.

    A wrapper such as Composer's SAM has the optimizer that it wraps as ``base_optimizer``, and the
    state of that is not in its own.

    Args:
        optimizer: The inner optimizer.
        sick: The fragments whose state is reset.
    """
    each: Any = optimizer
    while isinstance(each, torch.optim.Optimizer):
        for fragment in sick:
            for tensor in fragment.globals.live.values():
                each.state.pop(tensor, None)
        each = getattr(each, "base_optimizer", None)
