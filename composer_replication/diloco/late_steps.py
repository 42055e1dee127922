"""What a group keeps of its inner steps when the others have taken outer steps without it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from composer_replication.diloco.fragment_sync import FragmentSync
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.settings import DiLoCoSettings

log = logging.getLogger(__name__)


class LateSteps:
    """Carries a group's inner steps over the outer steps that it has missed.

    A group that was late for a quorum takes over the others' global parameters. What it has trained
    since its last sync is how far its local parameters are from the global ones of then, and that
    distance it keeps:

        local += theta_new - theta_old

    So its next sync sends theta_old - local, up to rounding, weighted as ever. Nothing counts
    twice: a fragment keeps nothing if it was sent and its vote was not seen, since the others may
    have committed it. Nor is anything kept

    * in a join, where what a checkpoint has may have been sent before;
    * after more than ``max_missed_outer_steps``;
    * with a shared sample stream, if the coordinator may have leased its samples to others, or if
      only a part of the fragments could keep their steps: the ledger cannot leave samples out;
    * with several fragments in flight, or while an average is to become global.

    Args:
        fragments: All fragments of this group.
        state: The global state.
        settings: The run's settings.
    """

    def __init__(
        self, fragments: Sequence[FragmentSync], state: GlobalState, settings: DiLoCoSettings
    ) -> None:
        self._fragments, self._state, self._settings = fragments, state, settings
        self._old: dict[int, Tensor] = {}
        """Of each fragment that keeps its steps: the global parameters from which it trained."""
        self._since: int | None = None
        """The outer step that they are from, from a heal until all ranks of the group have healed.
        None: the local parameters belong to the global ones."""
        self._steps_lost = 0

    def pop_steps_lost(self) -> int:
        """Inner steps that heals have thrown away since the last call."""
        lost, self._steps_lost = self._steps_lost, 0
        return lost

    def before_heal(self, outer_step: int) -> None:
        """Remember the global parameters of the fragments that keep their inner steps.

        Args:
            outer_step: That of the state which this group takes over.
        """
        since = self._state.outer_step if self._since is None else self._since
        self._since = since
        earlier, self._old = self._old, {}  # if another rank has failed to heal meanwhile
        if not self._may_keep(outer_step - since):
            return
        ledger = self._state.ledger
        unsynced = [fragment.unsynced for fragment in self._fragments]
        is_any_sent = any(each.is_sent and each.inner_steps for each in unsynced)
        if ledger.stream and (is_any_sent or not ledger.is_held()):
            return
        for index, fragment in enumerate(self._fragments):
            if unsynced[index].inner_steps and not unsynced[index].is_sent:
                old = earlier.get(index)
                self._old[index] = fragment.globals.flat.clone() if old is None else old
                unsynced[index].is_behind = True

    def _may_keep(self, missed: int) -> bool:
        fragments = self._fragments
        return (
            0 < missed <= self._settings.max_missed_outer_steps
            and not self._settings.turns_in_flight
            and not any(each.is_joining or each.unsynced.replaces_global for each in fragments)
            and all(each.unsynced.unsent is None for each in fragments)
        )

    def after_heal(self) -> None:
        """Continue from the new global parameters: at once, or in ``settle`` if there are ranks."""
        dropped = [each for i, each in enumerate(self._fragments) if i not in self._old]
        self._steps_lost += max((each.unsynced.inner_steps for each in dropped), default=0)
        for fragment in dropped:
            fragment.forget_local()
        if not self._fragments[0].globals.has_ranks:
            self.settle()

    def settle(self) -> None:
        """Once all ranks of the group have healed: continue from the new global parameters.

        A heal is no collective, and may fail on one rank alone, which the others would then wait
        for. So all ranks call this at each sync, and do together what all of them can.
        """
        keeps = [index in self._old for index in range(len(self._fragments))]
        all_healed, *all_keep = self._fragments[0].globals.mean_over_ranks(
            self._since is not None, *keeps
        )
        if all_healed < 1:
            return
        self._since, lost, kept = None, 0, False
        for index, fragment in enumerate(self._fragments):
            unsynced = fragment.unsynced
            old, unsynced.is_behind = self._old.pop(index, None), False
            if old is not None and all_keep[index] == 1:
                fragment.globals.carry_over(old)
                unsynced.late_steps, kept = unsynced.inner_steps, True
            else:
                lost = max(lost, unsynced.inner_steps)  # 0, unless another rank keeps nothing
                fragment.take_global()
        self._steps_lost += lost
        if not kept:
            self._state.ledger.stop_reading()
        if late := max(fragment.unsynced.late_steps for fragment in self._fragments):
            log.info(
                "The others have taken outer steps without this group; its %d inner steps since "
                "its last sync go into the next one",
                late,
            )
