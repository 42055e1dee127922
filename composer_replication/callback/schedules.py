"""The state of a job's learning rate schedulers, for a group that joins others in mid-run."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from composer import State, TimeUnit
from composer.optim import compile_composer_scheduler
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from composer_replication.callback.fit_watch import trainer_in_fit

log = logging.getLogger(__name__)

SchedulerStates = tuple[list[tuple[str, dict[str, Any] | None]], list[dict[str, float]]]
"""Class name and state of each of torch's schedulers, and the learning rates that they have set."""


class Schedules:
    """Saves the states of torch's schedulers, and loads those of a donor.

    torch's schedulers count their own steps. Composer's are functions of the timestamp and have no
    state.

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
        kept = [(type(each).__name__, each.state_dict()) for each in self._of_torch()]
        states = [(kind, state if _is_plain(state) else None) for kind, state in kept]
        return states, [_rates(group) for group in self._groups()]

    def load_state_dict(self, saved: SchedulerStates) -> None:
        """Load the donor's states. If one cannot be loaded, none is, and a warning says why."""
        states, rates = saved
        if not self._of_torch() or not self._fits(*saved):
            return
        for scheduler, (_, state) in zip(self._of_torch(), states, strict=True):
            scheduler.load_state_dict(state or {})
        self._set(rates)

    def load_from_rank_0(self, saved: SchedulerStates) -> None:
        """Load the states and all learning rates of rank 0 of this group."""
        self.load_state_dict(saved)
        if self._state.schedulers:
            self._set(saved[1])

    def _fits(
        self, states: list[tuple[str, dict[str, Any] | None]], rates: list[dict[str, float]]
    ) -> bool:
        own = [type(each).__name__ for each in self._of_torch()]
        theirs = [kind for kind, _ in states]
        num_own, num_theirs = len(self._groups()), len(rates)
        if own != theirs:
            problem = f"they have {theirs or 'none'}, and this group has {own}: use the same"
        elif num_own != num_theirs:
            problem = f"their optimizer has {num_theirs} groups of parameters, this one {num_own}"
        elif any(state is None for _, state in states):
            unsendable = [kind for kind, state in states if state is None]
            problem = f"the state of {unsendable} is more than numbers and plain containers"
        else:
            return True
        if not self._has_warned:
            log.warning("torch's schedulers keep their own state, not the donor's: %s", problem)
        self._has_warned = True
        return False

    def _set(self, rates: list[dict[str, float]]) -> None:
        for group, its_rates in zip(self._groups(), rates, strict=True):
            for name, rate in its_rates.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(rate)
                else:
                    group[name] = rate

    def end_batch(self, ends_epoch: bool) -> None:
        """Step the schedulers, as Composer does before it counts a finished batch."""
        if ends_epoch or not self._steps_by_epoch:
            # The step before it was the donor's; torch warns of a scheduler that goes first.
            self._state.optimizers[0]._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
            for scheduler in self._state.schedulers:
                scheduler.step()

    def _of_torch(self) -> Sequence[LRScheduler]:
        return [each for each in self._state.schedulers if not _is_of_composer(each)]

    def _groups(self) -> list[dict[str, Any]]:
        return self._state.optimizers[0].param_groups


def _is_of_composer(scheduler: LRScheduler) -> bool:
    """Whether Composer has made this LambdaLR from one of its own schedulers."""
    return isinstance(scheduler, LambdaLR) and all(
        getattr(fn, "__module__", None) == compile_composer_scheduler.__module__
        and fn.__qualname__.startswith(compile_composer_scheduler.__name__)
        for fn in scheduler.lr_lambdas
    )


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
