"""The turns of the fragments: what is sent in a quorum, and what its vote ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.saved_state import in_flight_state, load_in_flight
from composer_replication.diloco.sync_clock import SyncClock
from composer_replication.diloco.torchft_api import DiLoCoManager, connection_of


class Turns:
    """The fragments in flight, and whose turn it is.

    A turn has one quorum and one vote. After the quorum the next fragment is sent. Before the vote
    the oldest fragment in flight is waited for, and after it that one takes its outer step. With a
    delay below the inner steps of a turn it is the same fragment, as in torchft. With a longer one,
    those of ``turns_in_flight`` further turns are in flight between the two.

    torchft's step counts turns. So groups with the same step have the same fragments in flight, and
    a group with a lower one is healed. If the groups connect anew, they send all fragments in
    flight again, in order, before the next one: each mean is from one connection.

    torchft's hook (``local_sgd.py``, ``_step_post_hook``) calls ``prepare_sync`` and
    ``perform_sync``, as if this were the fragment in turn.

    Args:
        manager: The torchft manager, or its simulated double.
        fragments: All fragments, in the order of their turns.
        state: The global state.
        clock: Records when a quorum has formed and when a vote is over.
        turns_in_flight: For how many further turns a sync is in flight when its own has ended.
        settle: Continues from the global parameters after a heal.

    Attributes:
        in_flight: The fragments that were sent and have not taken their outer step, oldest first.
        is_open: Whether a turn has begun and its vote has not passed.
        has_failed: Whether the last vote has not passed.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        fragments: Sequence[FragmentSync],
        state: GlobalState,
        clock: SyncClock,
        turns_in_flight: int,
        settle: Callable[[], None],
    ) -> None:
        self._settle = settle
        self._manager, self._fragments, self._state = manager, fragments, state
        self._clock = clock
        self.turns_in_flight = turns_in_flight
        self.in_flight: deque[FragmentSync] = deque()
        self.is_open = self.has_failed = False
        self._connection: object = None
        self._num_begun = 1

    # ---- a turn -----------------------------------------------------------------------------

    def before_quorum(self) -> None:
        """Start the second messages of quantized syncs in flight, before others are sent.

        All groups start their messages in the same order. The quorum may connect the groups anew,
        and nothing of an earlier turn may then be sent through the new connections.
        """
        for fragment in self.in_flight:
            fragment.mean.advance()

    def prepare_sync(self) -> None:
        """Send what belongs into this quorum, and wait for nothing but the group's own ranks."""
        self._clock.quorum_formed()
        try:
            self._settle()
        except BaseException as error:  # else peers wait for this group until their timeout
            self._manager.report_error(error)  # pyright: ignore[reportArgumentType]
            raise
        connection = connection_of(self._manager)
        if connection != self._connection or self.has_failed:
            self._state.ledger.forget_sent()
            for fragment in self.in_flight:
                fragment.send_again(packs_anew=not self.turns_in_flight)
        self._connection, self.is_open = connection, True
        # torchft's step counts turns: after a heal, those of the others.
        num_begun = self._manager.current_step() - self._state.outer_step
        self._num_begun = min(max(1, num_begun), self.turns_in_flight + 1)
        while len(self.in_flight) < self._num_begun:
            fragment = self._next_fragment()
            self.in_flight.append(fragment)
            fragment.prepare_sync()

    def _next_fragment(self) -> FragmentSync:
        """The fragment that is sent next.

        It counts outer steps, and not the manager's step as torchft does: a join commits, but is no
        outer step.
        """
        turn = self._state.outer_step + len(self.in_flight)
        return self._fragments[turn % len(self._fragments)]

    def perform_sync(self) -> bool:
        """Vote, and take the outer step of the fragment whose sync ends with this turn.

        In the first turns of a run no sync ends.

        Returns:
            Whether the vote has passed.
        """
        oldest = self.in_flight[0]
        if self._ends_sync:
            committed = oldest.perform_sync()
        else:
            # All members have sent their tables: a joiner has healed, for which the vote ends the
            # offer, and it knows whether others are in training.
            oldest.wait_for_table()
            committed = self._manager.should_commit()
            self._clock.vote_over()
        self.has_failed = not committed
        return committed

    @property
    def _ends_sync(self) -> bool:
        """Whether the oldest sync in flight ends with this turn."""
        return len(self.in_flight) > self.turns_in_flight

    def end(self) -> FragmentSync | None:
        """End the turn, whose vote has passed.

        Returns:
            The fragment that has taken its outer step; None if no sync has ended.
        """
        self.is_open = False
        return self.in_flight.popleft() if self._ends_sync else None

    def take_back(self, *, has_healed: bool) -> None:
        """Forget the turn, in which all groups were joining: none has sent anything.

        What a checkpoint had in flight is still to be sent. A group that has taken over another
        one's checkpoint sends nothing in its place.

        Args:
            has_healed: Whether this group has taken over another one's checkpoint.
        """
        for fragment in self.in_flight:
            fragment.abandon()
        if has_healed:
            self.in_flight.pop()
        else:
            kept = (each for each in self.in_flight if each.unsynced.unsent is not None)
            self.in_flight = deque(kept)
        self.is_open = len(self.in_flight) >= self._num_begun
        self._connection = None
        self.set_torchft_step()

    def drop(self) -> None:
        """Forget all fragments in flight, which no group needs any more.

        After a heal the others have the means, and at the end nobody has contributed to them.
        """
        for fragment in self.in_flight:
            fragment.abandon()
        self.in_flight.clear()
        self._state.ledger.forget_sent()

    def set_torchft_step(self) -> None:
        """Set torchft's step to that of the next turn, after a commit that was no turn.

        torchft counts commits, and the groups with the highest count heal the others. A join, a
        start and an end also commit. Without this, groups that wait for others to resume would
        count up meanwhile, and would heal a group that comes with a newer checkpoint. The + 1 is
        for the cold start: to torchft, a group at step 0 has no state.
        """
        step = self._state.outer_step + len(self.in_flight) - self.is_open + 1
        self._manager.load_state_dict(self._manager.state_dict() | {"step": step})

    # ---- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What is in flight; None if nothing is."""
        return in_flight_state(self.in_flight, len(self.in_flight) - self.is_open)

    def load_state_dict(self, saved: dict[str, Any] | None, *, is_in_turn: bool) -> bool:
        """Continue from a ``state_dict``: what was in flight is sent again in the next quorum.

        Under other settings than those of the checkpoint it may not fit. Then all pseudo-gradients
        are computed anew.

        Args:
            saved: What ``state_dict`` returned.
            is_in_turn: Whether the schedule is between a turn's quorum and its vote.

        Returns:
            Whether a turn has begun.
        """
        loaded, num_turns = load_in_flight(saved, self._fragments)
        fits = num_turns <= self.turns_in_flight and len(loaded) - num_turns <= is_in_turn
        if not fits:
            for fragment in loaded:
                fragment.unsynced.unsent = None
            loaded, num_turns = [], 0
        self.in_flight = deque(loaded)
        self.is_open = len(loaded) > num_turns
        self.set_torchft_step()
        return self.is_open

    @property
    def is_unsent(self) -> bool:
        """Whether the turn that has begun in the checkpoint is still to be sent."""
        return self.is_open and self.in_flight[-1].unsynced.unsent is not None
