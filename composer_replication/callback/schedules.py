"""The schedulers of a Composer job: a joiner takes over their states."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import Any

from composer import State, TimeUnit
from torch import Tensor

from composer_replication.callback.trainer_watch import trainer_in_fit

log = logging.getLogger(__name__)

SchedulerStates = tuple[list[tuple[str, dict[str, Any] | None]], list[dict[str, float]]]
"""Class name and state of each of torch's schedulers, and the learning rates that they have set."""


class Schedules:
    """Saves the states of the job's schedulers, and loads those of a donor.

    torch's schedulers count their own steps. Composer's are functions of the timestamp, wrapped in
    a torch scheduler whose count they do not read.

    Args:
        state: Composer's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        trainer = trainer_in_fit()
        by_epoch = trainer is not None and trainer._scheduler_step_frequency == TimeUnit.EPOCH
        self._steps_by_epoch = by_epoch
        self._has_warned = False

    def state_dict(self) -> SchedulerStates:
        """Return the states for a joiner. A state that is not plain numbers is None."""
        kept = [(type(each).__name__, each.state_dict()) for each in self._state.schedulers]
        states = [(kind, state if _is_plain(state) else None) for kind, state in kept]
        return states, [_rates(group) for group in self._groups()]

    def load_state_dict(self, saved: SchedulerStates) -> bool:
        """Load the donor's states. If one cannot be loaded, none is, and a warning says why.

        Returns:
            Whether they have been loaded.
        """
        states, rates = saved
        schedulers = self._state.schedulers
        own = [type(each).__name__ for each in schedulers]
        theirs = [kind for kind, state in states if state]
        fits = own == theirs and len(rates) == len(self._groups())
        if fits:
            for scheduler, (_, state) in zip(schedulers, states, strict=True):
                scheduler.load_state_dict(state or {})
            for group, its_rates in zip(self._groups(), rates, strict=True):
                for name, rate in its_rates.items():
                    if isinstance(group.get(name), Tensor):
                        group[name].fill_(rate)
                    else:
                        group[name] = rate
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "Schedulers keep their own state, not the donor's: it has sent those of %s for %d "
                "groups of parameters, and this group has %s for %d. Use the same, whose states "
                "are numbers and plain containers",
                theirs,
                len(rates),
                own,
                len(self._groups()),
            )
        return fits

    def end_batch(self, ends_epoch: bool) -> None:
        """Step the schedulers, as Composer does before it counts a finished batch."""
        if ends_epoch or not self._steps_by_epoch:
            # The donor took the step before it; torch warns if a scheduler steps before the
            # optimizer.
            self._state.optimizers[0]._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
            for scheduler in self._state.schedulers:
                scheduler.step()

    def _groups(self) -> list[dict[str, Any]]:
        return self._state.optimizers[0].param_groups


def _rates(group: dict[str, Any]) -> dict[str, float]:
    return {name: float(group[name]) for name in ("lr", "initial_lr") if name in group}


def _is_plain(value: Any) -> bool:
    """Whether a heal can send this value, see ``replica.heal.state_bytes.load``."""
    if isinstance(value, dict):
        if type(value) not in (dict, OrderedDict, Counter):
            return False
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, Tensor)
