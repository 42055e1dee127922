"""The outer loop of one replica group: join, sync until it commits, report it, end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.inner_optimizer import clear_state
from composer_replication.diloco.joining import (
    MinSizeWait,
    StartBarrier,
    SyncError,
    agree_on_settings,
    share_initial_parameters,
)
from composer_replication.diloco.options import StartPolicy
from composer_replication.diloco.peer_table import PeerTable
from composer_replication.diloco.sample_ledger import SyncedSamples
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.sync_report import SyncClock, SyncReport
from composer_replication.diloco.torchft_api import HEAL_STATE, DiLoCoManager, fault_of_last_sync

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Back-off between the attempts of a sync, in seconds."""


class OuterLoop:
    """Runs the syncs of all fragments, one after the other.

    Args:
        manager: The torchft manager, or its simulated double.
        fragments: The fragments in the order of their turns.
        state: The global state of all fragments.
        settings: The run's settings.
        clock: The clock that the fragments report quorums and votes to.
        peer_table: The table that the fragments send.
        inner_optimizer: Its state is reset after a pseudo-gradient that is not finite.
        digest_every: Every how many outer steps a report contains the digest; 0: never.
        give_up_after_s: How long a sync waits for enough groups, in seconds. None: without a limit.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        fragments: list[FragmentSync],
        state: GlobalState,
        settings: DiLoCoSettings,
        clock: SyncClock,
        peer_table: PeerTable,
        inner_optimizer: torch.optim.Optimizer,
        digest_every: int,
        give_up_after_s: float | None,
    ) -> None:
        self._manager = manager
        self._fragments = fragments
        self._state = state
        self._max_retries = settings.max_sync_retries
        self._clock = clock
        self._peer_table = peer_table
        self._inner_optimizer = inner_optimizer
        self._digest_every = digest_every
        self._give_up_after_s = give_up_after_s
        self.has_healed = False
        self._sick_in_a_row = 0
        self._steps_lost = 0
        self.ends_with_next_step = self._is_idle = False
        self.inner_steps = 0
        self.reports: list[SyncReport] = []
        self.known_settings: dict[int, DiLoCoSettings] = {}
        manager.register_state_dict_fn(HEAL_STATE, self._heal, self._state_for_joiner)

    @property
    def turn(self) -> int:
        """The index of the fragment that is synchronised next.

        It counts outer steps, and not the manager's step as torchft does: a join commits, but is no
        outer step.
        """
        return self._state.outer_step % len(self._fragments)

    @property
    def synced_samples(self) -> Sequence[SyncedSamples]:
        """How much of each group's samples the last sync has brought into the model."""
        return self._peer_table.synced_samples

    def count_inner_step(self, samples: int) -> None:
        """Count a completed inner step, of ``samples`` samples."""
        self.inner_steps += 1
        self._peer_table.is_over = False
        self._peer_table.is_training = not self.ends_with_next_step
        for fragment in self._fragments:
            fragment.count_inner_step(samples)

    def make_local_global(self) -> None:
        """Have the local parameters become the global ones, see ``DiLoCo.make_local_global``."""
        self._peer_table.is_over = False  # this group has more to send, even after its last step
        for fragment in self._fragments:
            fragment.replaces_global = True

    def offer(self, version: int) -> None:
        """Report to the other groups, at the next sync, which version of the settings is known."""
        self._peer_table.known_version = max(version, self._peer_table.known_version)

    def send_again(self) -> None:
        """Send again what was in flight in the checkpoint that this group resumes from."""
        self._manager.start_quorum()
        self._fragments[self.turn].prepare_sync()

    def sync(self) -> None:
        """Run one sync from quorum to vote, and retry it until it commits."""
        with self._clock.blocking():
            self._manager.start_quorum()
            self._sync_in_quorum()
            self.finish_sync()

    def _sync_in_quorum(self) -> None:
        fragment = self._fragments[self.turn]
        fragment.prepare_sync()
        fragment.perform_sync()

    def finish_sync(self) -> None:
        """Retry the sync until it commits, then report it.

        Local and global parameters do not change before the vote, so a retry computes the same
        pseudo-gradient again. (torchft resets the model and drops the round.)

        A failed attempt counts against ``max_sync_retries`` if no group is known to have caused it.
        (A group in training that causes failures leaves after a while, see ``QuorumWatch``.)

        Raises:
            SyncError: Too many such attempts in a row have failed.
        """
        attempts = unexplained = 0
        min_size_wait = MinSizeWait(self._manager, self._give_up_after_s)
        while not self._fragments[self.turn].committed:
            cause, has_too_few = self._why_not_committed(), min_size_wait.has_too_few()
            if has_too_few:
                min_size_wait.wait()
            else:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempts)
                attempts += 1
                log.warning(
                    "The sync after outer step %d did not commit, attempt %d: %s. Nothing is lost; "
                    "trying again in %.1f s",
                    self._state.outer_step,
                    attempts,
                    cause,
                    pause_s,
                )
                time.sleep(pause_s)
            self._manager.start_quorum()
            # Only this quorum says which group caused the failure before it.
            counts = None if not self._fragments[self.turn].is_joining else "this"
            if fault_of_last_sync(self._manager) not in (None, counts):
                unexplained = 0
            elif not has_too_few:
                unexplained += 1
                self._check_attempts(unexplained, cause)
            # If a peer has committed the sync, this quorum has healed this group, and the next
            # fragment has its turn.
            self._sync_in_quorum()
        self._account(self._fragments[self.turn], attempts)

    def _check_attempts(self, failed: int, cause: str) -> None:
        """Give up after too many failed attempts.

        A joiner gives up before the groups in training. Of these, one gives up at a time, the last
        of the quorum first: the others may then succeed without it.

        Raises:
            SyncError: ``failed`` is above this group's limit.
        """
        if self._fragments[self.turn].is_joining:
            limit = StartBarrier.MAX_FAILURES - 1
        else:
            rank = self._manager.participating_rank() or 0
            limit = self._max_retries + self._manager.num_participants() - 1 - rank
        if failed > limit:
            error = SyncError(
                f"the sync after outer step {self._state.outer_step} did not commit in "
                f"{failed} attempts, the last one because {cause}. Local parameters are "
                "kept. Check that the other replica groups and the lighthouse are alive, or "
                f"raise max_sync_retries={self._max_retries}"
            )
            self._manager.report_error(error)  # the other groups are in a quorum with this one
            raise error

    def _why_not_committed(self) -> str:
        error = self._manager.errored()
        if error is not None:
            original = getattr(error, "original_exception", error)
            return f"{type(original).__name__}: {original}".splitlines()[0]
        return (
            f"{self._manager.num_participants()} replica groups in the quorum are too few, or "
            "another rank of this group reported an error"
        )

    def _account(self, fragment: FragmentSync, retries: int) -> None:
        moved = fragment.total_contribution > 0
        if moved:
            self._state.end_outer_step(
                self._peer_table.synced_samples
            )  # ends what FragmentSync._set_grads has begun
        else:
            self.set_torchft_step()
        if fragment.mean.is_finite:
            fragment.discard_synced_steps()
            self._sick_in_a_row = 0
        else:
            self._recover()
        sync_seconds, wait_seconds, compute_fraction = self._clock.read()
        is_idle = self._is_idle or not self._peer_table.is_training
        if not moved and (fragment.is_joining or is_idle):
            return  # a cold start, a resume of all groups, or an end: no outer step to report
        has_digest = self._digest_every and self._state.outer_step % self._digest_every == 0
        self.reports.append(
            SyncReport(
                outer_step=self._state.outer_step,
                fragment=fragment.fragment_id,
                num_participants=self._manager.num_participants(),
                contribution=fragment.contribution,
                total_contribution=fragment.total_contribution,
                inner_steps=self.inner_steps,
                sync_seconds=sync_seconds,
                wait_seconds=wait_seconds,
                compute_fraction=compute_fraction,
                bytes_sent=fragment.mean.num_bytes,
                bytes_float32=fragment.mean.num_bytes_float32,
                pseudo_gradient_norm=fragment.mean.norm,
                outer_momentum_norm=fragment.globals.momentum_norm(),
                steps_lost=self._steps_lost,
                retries=retries,
                healed=self.has_healed,
                outer_lr=fragment.globals.optimizer.param_groups[0]["lr"],
                settings_version=self._state.settings_version,
                global_digest=self._state.digest() if has_digest else None,
            )
        )
        self.has_healed = False
        self._steps_lost = 0
        if moved:  # a group that missed this commit gets the settings by a heal
            self._adopt_agreed_settings()

    def _adopt_agreed_settings(self) -> None:
        """Adopt the newest settings that all groups know: all have read the same table."""
        version = self._peer_table.agreed_version
        if version > self._state.settings_version and version in self.known_settings:
            self._state.adopt(version, self.known_settings[version])

    def _recover(self) -> None:
        """Continue from the global parameters, after a pseudo-gradient that was not finite.

        Raises:
            SyncError: More than ``max_sync_retries`` syncs in a row had such a pseudo-gradient.
        """
        self._sick_in_a_row += 1
        if self._sick_in_a_row > self._max_retries:
            raise SyncError(
                f"this group's pseudo-gradient was not finite in {self._sick_in_a_row} syncs in a "
                "row, the last one outer step "
                f"{self._state.outer_step}: it leaves, and the others continue. Check its data, "
                "its learning rate and its hardware"
            )
        log.warning(
            "This group's pseudo-gradient is not finite at outer step %d: it contributed nothing; "
            "the group continues from the global parameters with a fresh inner optimizer state",
            self._state.outer_step,
        )
        self._drop_local()
        clear_state(self._inner_optimizer)

    def _drop_local(self, *, is_healing: bool = False) -> None:
        """Continue from the global parameters, without what was trained since the last syncs."""
        self._steps_lost += max(fragment.inner_steps for fragment in self._fragments)
        self._state.is_behind = is_healing and self._fragments[0].globals.is_shared
        for fragment in self._fragments:
            if self._state.is_behind:
                fragment.forget_local()
            else:
                fragment.take_global()
        self._state.ledger.stop_reading()

    def join(self, policy: StartPolicy, start_refusal: str | None) -> bool:
        """Obtain the global state before the first inner step, without contributing.

        At a cold start no group has a global state: all wait for each other and take the initial
        parameters of the first. In a run that has begun, this group joins at the peers' next sync,
        where torchft heals it. If all groups are resuming, they also wait for each other, and each
        continues where it stopped.

        Args:
            policy: How a cold start waits for the others.
            start_refusal: The reason why this group must not begin the run. None: it may begin it.

        Returns:
            Whether this group has joined others in training.

        Raises:
            TimeoutError: Too few groups were connected in time, or the join failed too often.
            SettingsMismatch: This group's settings differ from the others'.
            NothingToContinueFromError: All groups are connected, and none may begin the run.
        """
        barrier = StartBarrier(self._manager, policy, start_refusal)
        device = self._fragments[0].device
        while True:
            self._manager.start_quorum()
            barrier.check_failures(fault_of_last_sync(self._manager) == "another")
            if self._manager.current_step() == 0:
                starts = barrier.vote_to_start(device)
                if self._start() if starts else self._manager.should_commit():
                    return False
            else:
                if self._manager.num_participants() > 1 or policy.num_awaited == 1:
                    self._sync_joining()
                    if not self._peer_table.are_all_joining:
                        self._state.ledger.stop_reading()  # resumed steps may be lost in part
                        return True
                    agree_on_settings(self._manager, self._state.fingerprint, device)
                # This group is alone, or all are resuming. Without the vote it would begin to
                # train, and a group that resumes later would have to join it.
                barrier.vote_to_start(device)
                if self._manager.should_commit():
                    self._state.go_on_from_healed()
                    self.set_torchft_step()
                    return False
            error = self._manager.errored()
            barrier.wait(getattr(error, "original_exception", error), self._why_not_committed())

    def set_torchft_step(self) -> None:
        """Set torchft's step to the outer step + 1, after a commit that was no outer step.

        torchft counts commits, and the groups with the highest count heal the others. A join, a
        start and an end also commit. Without this, groups that wait for others to resume would
        count up meanwhile, and would heal a group that comes with a newer checkpoint. The + 1 is
        for the cold start: to torchft, a group at step 0 has no state.
        """
        step = self._state.outer_step + 1
        self._manager.load_state_dict(self._manager.state_dict() | {"step": step})

    def _start(self) -> bool:
        agree_on_settings(self._manager, self._state.fingerprint, self._fragments[0].device)
        if not share_initial_parameters(self._manager, self._fragments):
            return False
        log.info("Started with %d replica groups", self._manager.num_participants())
        self._clock.read()  # the wait for the start belongs to no sync
        return True

    def _sync_joining(self) -> None:
        for fragment in self._fragments:
            fragment.is_joining = True
        self._sync_in_quorum()
        self.finish_sync()
        for fragment in self._fragments:
            fragment.is_joining = False

    def finish(self) -> None:
        """Sync until no group has anything to send, and end on the global parameters.

        Groups that have ended take part in the syncs of those that still train, and contribute
        nothing.
        """
        self._land()
        self._peer_table.is_training = False
        is_alone = self._manager.num_participants() == 1
        while not self._peer_table.is_over:
            if is_alone and not any(fragment.has_more for fragment in self._fragments):
                break
            self.sync()
        self._peer_table.is_training, self.ends_with_next_step = True, False
        for fragment in self._fragments:
            fragment.take_global()

    def sync_idle(self) -> None:
        """Take part in the others' next sync, with the inner steps since the last one.

        For a group that has no samples to train on at the moment, and may get some. Without it the
        others could end the run, or this group would fall behind and be healed.
        """
        self._land()
        self._peer_table.is_training = self._is_idle = True
        try:
            self.sync()
        finally:
            self._is_idle = False

    def _land(self) -> None:
        if any(fragment.is_in_flight for fragment in self._fragments):
            with self._clock.blocking():
                self._fragments[self.turn].perform_sync()
                self.finish_sync()

    def _state_for_joiner(self) -> dict[str, Any]:
        """Return the state that a joiner takes over. torchft calls it in a donor's quorum."""
        self._state.compare_next = True
        return self._state.state_dict()

    def _heal(self, state: dict[str, Any]) -> None:
        """Take over a donor's global state. torchft calls it inside ``start_quorum``."""
        self._state.take_over(state, "the replica groups in training")
        self._drop_local(is_healing=True)
        self.has_healed = True
        log.info("Took over the global state after outer step %d", self._state.outer_step)
