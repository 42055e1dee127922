"""The learning rates of a job's schedulers, for a group that joins another one in mid-run."""

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

Given = tuple[list[tuple[str, dict[str, Any] | None]], list[dict[str, float]]]
"""Of each of torch's schedulers its kind and state; the learning rates that they have set."""


class Schedules:
    """Gives the states of torch's schedulers, and takes those of a donor.

    torch's schedulers count their own steps. Composer's are functions of the timestamp, and need
    no state.

    Args:
        state: Composer's.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        trainer = trainer_in_fit()
        by_epoch = trainer is not None and trainer._scheduler_step_frequency == TimeUnit.EPOCH
        self._steps_by_epoch = by_epoch
        self._has_warned = False

    def give(self) -> Given:
        """What a joiner gets; None for a scheduler with more in its state than plain numbers."""
        kept = [(type(each).__name__, each.state_dict()) for each in self._of_torch()]
        states = [(kind, state if _is_plain(state) else None) for kind, state in kept]
        return states, [_rates(group) for group in self._groups()]

    def take(self, given: Given) -> None:
        """Go on where the donor's are. What it could not give is logged, and stays as it is."""
        states, rates = given
        if not self._of_torch() or not self._fits(*given):
            return
        for scheduler, (_, state) in zip(self._of_torch(), states, strict=True):
            scheduler.load_state_dict(state or {})
        self._set(rates)

    def level(self, given: Given) -> None:
        """Take what rank 0 of this group gives, and all its learning rates."""
        self.take(given)
        if self._state.schedulers:
            self._set(given[1])

    def _fits(
        self, states: list[tuple[str, dict[str, Any] | None]], rates: list[dict[str, float]]
    ) -> bool:
        here = [type(each).__name__ for each in self._of_torch()]
        there = [kind for kind, _ in states]
        groups_here, groups_there = len(self._groups()), len(rates)
        if here != there:
            problem = f"they have {there or 'none'}, and here are {here}: use the same"
        elif groups_here != groups_there:
            problem = f"their optimizer has {groups_there} groups of parameters, ours {groups_here}"
        elif any(state is None for _, state in states):
            stay = [kind for kind, state in states if state is None]
            problem = f"the state of {stay} is more than numbers and plain containers"
        else:
            return True
        if not self._has_warned:
            log.warning("torch's schedulers do not go on where the other groups' are: %s", problem)
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
        """Do what Composer does at the end of a batch, before the timestamp counts it."""
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
    """Whether it is a LambdaLR that Composer has made of one of its own."""
    return isinstance(scheduler, LambdaLR) and all(
        getattr(fn, "__module__", None) == compile_composer_scheduler.__module__
        and fn.__qualname__.startswith(compile_composer_scheduler.__name__)
        for fn in scheduler.lr_lambdas
    )


def _rates(group: dict[str, Any]) -> dict[str, float]:
    return {name: float(group[name]) for name in ("lr", "initial_lr") if name in group}


def _is_plain(value: Any) -> bool:
    """Whether a heal can carry it, see ``state_bytes.load``."""
    if isinstance(value, dict):
        if type(value) not in (dict, OrderedDict, Counter):
            return False
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, Tensor)
