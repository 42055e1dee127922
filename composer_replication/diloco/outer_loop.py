"""The outer loop of one group: join, sync until it commits, account for it, end."""

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
    Patience,
    StartBarrier,
    SyncError,
    agree_on_settings,
    share_initial_parameters,
)
from composer_replication.diloco.options import StartPolicy
from composer_replication.diloco.peer_table import RollCall
from composer_replication.diloco.sample_ledger import Claim
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.diloco.sync_report import SyncClock, SyncReport
from composer_replication.diloco.torchft_api import DiLoCoManager, fault_of_last_sync

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Back-off between the attempts of a sync: what fails at once may work a moment later."""


class OuterLoop:
    """Runs the syncs of all fragments, one after the other.

    Args:
        manager: The torchft manager, or its simulated double.
        fragments: In the order of their turns.
        state: The global state they make up.
        settings: The run's settings.
        clock: The one that the fragments tell of quorums and votes.
        roll_call: The one that the fragments send.
        inner_optimizer: Its state is dropped when the group's training has gone wrong.
        digest_every: Every how many outer steps a report has the digest; 0 for never.
        give_up_after_s: How long a sync waits for enough groups; None for ever.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        fragments: list[FragmentSync],
        state: GlobalState,
        settings: DiLoCoSettings,
        clock: SyncClock,
        roll_call: RollCall,
        inner_optimizer: torch.optim.Optimizer,
        digest_every: int,
        give_up_after_s: float | None,
    ) -> None:
        self._manager = manager
        self._fragments = fragments
        self._state = state
        self._max_retries = settings.max_sync_retries
        self._clock = clock
        self._roll_call = roll_call
        self._inner_optimizer = inner_optimizer
        self._digest_every = digest_every
        self._give_up_after_s = give_up_after_s
        self.has_healed = False
        self._sick_in_a_row = 0
        self._steps_lost = 0
        self.ends_with_next_step = self._is_standing_by = False
        self.inner_steps = 0
        self.reports: list[SyncReport] = []
        self.known_settings: dict[int, DiLoCoSettings] = {}
        manager.register_state_dict_fn("diloco", self._heal, self._hand_over)

    @property
    def turn(self) -> int:
        """Whose turn it is.

        By outer steps and not, as in torchft, by the manager's step: a join commits without being
        an outer step.
        """
        return self._state.outer_step % len(self._fragments)

    @property
    def claims(self) -> Sequence[Claim]:
        """How far the groups of the last sync had read."""
        return self._roll_call.claims

    def count_inner_step(self, samples: int) -> None:
        """Count a completed inner step, of ``samples`` samples."""
        self.inner_steps += 1
        self._roll_call.is_over = False
        self._roll_call.is_training = not self.ends_with_next_step
        for fragment in self._fragments:
            fragment.count_inner_step(samples)

    def make_local_global(self) -> None:
        """Have the local parameters become the global ones, see ``DiLoCo.make_local_global``."""
        self._roll_call.is_over = False  # this group has more to send, even after its last step
        for fragment in self._fragments:
            fragment.replaces_global = True

    def offer(self, version: int) -> None:
        """Tell the others which version of the settings this group knows."""
        self._roll_call.known_version = max(version, self._roll_call.known_version)

    def send_again(self) -> None:
        """Send what was in flight when the state was saved that this group continues from."""
        self._manager.start_quorum()
        self._fragments[self.turn].prepare_sync()

    def sync(self) -> None:
        """One sync from quorum to vote, and again until it commits."""
        with self._clock.blocking():
            self._manager.start_quorum()
            self._sync_in_quorum()
            self.settle()

    def _sync_in_quorum(self) -> None:
        fragment = self._fragments[self.turn]
        fragment.prepare_sync()
        fragment.perform_sync()

    def settle(self) -> None:
        """Account for a sync that committed; keep and retry one that did not.

        Local and global parameters are untouched until the vote, so that the retry forms the same
        pseudo-gradient again. (torchft resets the model and drops the round.)

        An attempt counts against ``max_sync_retries`` if nobody can be blamed for its failure. (A
        group in training that is to blame leaves after a time, see ``QuorumWatch``.)

        Raises:
            SyncError: Too many such attempts in a row have failed.
        """
        attempts = unexplained = 0
        patience = Patience(self._manager, self._give_up_after_s)
        while not self._fragments[self.turn].committed:
            cause, has_too_few = self._why_not_committed(), patience.has_too_few()
            if has_too_few:
                patience.wait()
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
            # Only this quorum says who is to blame for the failure before it.
            counts = None if not self._fragments[self.turn].is_joining else "this"
            if fault_of_last_sync(self._manager) not in (None, counts):
                unexplained = 0
            elif not has_too_few:
                unexplained += 1
                self._check_attempts(unexplained, cause)
            # If a peer has committed it, that quorum healed us, and the next fragment has its turn.
            self._sync_in_quorum()
        self._account(self._fragments[self.turn], attempts)

    def _check_attempts(self, failed: int, cause: str) -> None:
        """Give up after too many attempts: a joiner before those in training, and of those one
        group at a time, the last of the quorum first. The others may go on without it."""
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
            self._manager.report_error(error)  # the others have this group in their quorum
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
                self._roll_call.claims
            )  # begun when the fragment was handed the mean
        else:
            self.tell_torchft_the_step()
        if fragment.mean.is_finite:
            fragment.settle()
            self._sick_in_a_row = 0
        else:
            self._recover()
        sync_seconds, wait_seconds, compute_fraction = self._clock.read()
        is_idle = self._is_standing_by or not self._roll_call.is_training
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
        if moved:  # whoever missed this commit is healed then, and else would not hear of them
            self._adopt_agreed_settings()

    def _adopt_agreed_settings(self) -> None:
        """All groups of this sync have read the same table, so all adopt after the same one."""
        version = self._roll_call.agreed_version
        if version > self._state.settings_version and version in self.known_settings:
            self._state.adopt(version, self.known_settings[version])

    def _recover(self) -> None:
        """After a pseudo-gradient that was not finite: continue from the global parameters.

        Raises:
            SyncError: It has happened too often in a row.
        """
        self._sick_in_a_row += 1
        if self._sick_in_a_row > self._max_retries:
            raise SyncError(
                f"this group's pseudo-gradient was not finite in {self._sick_in_a_row} syncs in a "
                "row, the last one outer step "
                f"{self._state.outer_step}: it leaves, and the others go on. Look at its data, its "
                "learning rate and its hardware"
            )
        log.warning(
            "This group's pseudo-gradient is not finite at outer step %d: it contributed nothing; "
            "the group goes on from the global parameters with a fresh inner optimizer state",
            self._state.outer_step,
        )
        self._drop_local()
        clear_state(self._inner_optimizer)

    def _drop_local(self) -> None:
        """Continue from the global parameters, without what was trained since the last syncs."""
        self._steps_lost += max(fragment.inner_steps for fragment in self._fragments)
        for fragment in self._fragments:
            fragment.take_global()
        self._state.ledger.stop_reading()

    def join(self, policy: StartPolicy, must_not_start: str | None) -> bool:
        """Take the global state and contribute nothing, before the first inner step.

        At a cold start nobody has one: all wait for each other and take the initial parameters of
        the first. Later the peers' next sync is this group's join (its heal is torchft's). If all
        are resuming they wait for each other too, and each goes on where it stopped.

        Args:
            policy: How a cold start waits for the others.
            must_not_start: Why this group must not begin a run; None: it may.

        Returns:
            Whether this group has joined others in training.
        """
        barrier = StartBarrier(self._manager, policy, must_not_start)
        device = self._fragments[0].device
        while True:
            self._manager.start_quorum()
            barrier.check_failures(fault_of_last_sync(self._manager) == "another")
            if self._manager.current_step() == 0:
                starts = barrier.hears_start(device)
                if self._start() if starts else self._manager.should_commit():
                    return False
            else:
                if self._manager.num_participants() > 1 or policy.num_awaited == 1:
                    self._sync_joining()
                    if not self._roll_call.are_all_joining:
                        self._state.ledger.stop_reading()  # resumed steps may be lost in part
                        return True
                    agree_on_settings(self._manager, self._state.fingerprint, device)
                # Alone, or all are resuming: whoever else resumes would find us training.
                barrier.hears_start(device)
                if self._manager.should_commit():
                    self.tell_torchft_the_step()
                    return False
            error = self._manager.errored()
            barrier.wait(getattr(error, "original_exception", error), self._why_not_committed())

    def tell_torchft_the_step(self) -> None:
        """Have torchft's step be the outer step and one, after a commit that was no outer step.

        torchft counts commits, and those with the highest count heal the others. A join, a start
        and an end commit too: groups that wait for others to resume would count up meanwhile, and
        heal one that comes with a newer checkpoint. The one is for the cold start: a group at
        step 0 holds nothing.
        """
        step = self._state.outer_step + 1
        self._manager.load_state_dict(self._manager.state_dict() | {"step": step})

    def _start(self) -> bool:
        agree_on_settings(self._manager, self._state.fingerprint, self._fragments[0].device)
        if not share_initial_parameters(self._manager, self._fragments):
            return False
        log.info("Started with %d replica groups", self._manager.num_participants())
        self._clock.read()  # the wait for the start is no sync's
        return True

    def _sync_joining(self) -> None:
        for fragment in self._fragments:
            fragment.is_joining = True
        self._sync_in_quorum()
        self.settle()
        for fragment in self._fragments:
            fragment.is_joining = False

    def finish(self) -> None:
        """Synchronise what is left, until no group has more; continue from the global parameters.

        Groups that have ended take part in the syncs of those that still train, with nothing.
        """
        self._land()
        self._roll_call.is_training = False
        is_alone = self._manager.num_participants() == 1
        while not self._roll_call.is_over:
            if is_alone and not any(fragment.has_more for fragment in self._fragments):
                break
            self.sync()
        self._roll_call.is_training, self.ends_with_next_step = True, False
        for fragment in self._fragments:
            fragment.take_global()

    def stand_by(self) -> None:
        """Take part in the others' next sync, with what has been trained since the last.

        For a group that has no samples to train on now, and may get some. It keeps the others from
        ending, and they keep it from falling behind.
        """
        self._land()
        self._roll_call.is_training = self._is_standing_by = True
        try:
            self.sync()
        finally:
            self._is_standing_by = False

    def _land(self) -> None:
        if any(fragment.is_in_flight for fragment in self._fragments):
            with self._clock.blocking():
                self._fragments[self.turn].perform_sync()
                self.settle()

    def _hand_over(self) -> dict[str, Any]:
        """What a joiner takes over from this group."""
        self._state.was_given = True
        return self._state.state_dict()

    def _heal(self, state: dict[str, Any]) -> None:
        """Take over a donor's global state. torchft calls it inside ``start_quorum``."""
        self._state.take_over(state, "the replica groups in training")
        self._drop_local()
        self.has_healed = True
        log.info("Took over the global state after outer step %d", self._state.outer_step)
