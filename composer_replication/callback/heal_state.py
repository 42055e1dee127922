"""The part of a heal that belongs to the Composer job.

A joiner gets it beside the global state: the position in training, torch's schedulers, and the
averages of EMA and SWA. Its inner optimizer keeps its own state.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from composer import Logger, State, Timestamp, TimeUnit
from composer.utils import dist
from torch import Tensor

from composer_replication.callback.progress import max_batches
from composer_replication.callback.trainer_watch import trainer_in_fit
from composer_replication.callback.weight_averages import WeightAverages

log = logging.getLogger(__name__)


SchedulerStates = tuple[list[tuple[str, dict[str, Any] | None]], list[dict[str, float]]]
"""Class name and state of each of torch's schedulers, and the learning rates that they have set."""


class HealState:
    """Saves and loads the state of a Composer job that torchft's heal sends to a joiner.

    Args:
        state: Composer's state.
        is_in_batch: Returns whether this group is inside a batch that it has not counted yet.
        averages: The job's EMA and SWA.
    """

    def __init__(
        self, state: State, is_in_batch: Callable[[], bool], averages: WeightAverages
    ) -> None:
        self._state = state
        self._is_in_batch = is_in_batch
        self._averages = averages
        self._schedules = Schedules(state)
        self._is_new = state.timestamp.batch.value == 0
        end = state.max_duration
        self._ends_by_epoch = end is not None and end.unit == TimeUnit.EPOCH
        self._received_averages: tuple[list[Any], bool] = [], False
        self._has_healed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a joiner: averages on rank 0 only."""
        return {
            "timestamp": _counts(self._state.timestamp),
            "is_in_batch": self._is_in_batch(),
            "ends_epoch": self._is_in_batch() and self._ends_epoch(),
            "ends_at": max_batches(self._state),
            "schedules": self._schedules.state_dict(),
            "averages": self._averages.state_dict() if dist.get_global_rank() == 0 else [],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at the donor's position, so that both groups end at the same batch.

        Args:
            saved: What ``state_dict`` returned in the donor.
        """
        self._has_healed = True
        # EMA and SWA also update at the end of this batch, which would change the donor's averages:
        # broadcast_from_rank_0 loads them after that.
        misses_an_update = saved["is_in_batch"] or self._is_in_batch()
        self._received_averages = saved["averages"], misses_an_update
        self._load_position(saved)

    def broadcast_from_rank_0(self, logger: Logger) -> None:
        """After a heal, give all ranks of the group what rank 0 has received from its donor.

        torchft picks a donor for each rank. Donors can be at different batches, if some have
        skipped steps.

        Args:
            logger: Composer's logger, for an update of the averages.
        """
        if not self._has_healed:
            return
        self._has_healed = False
        position = [(_counts(self._state.timestamp), self._state.max_duration)]
        dist.broadcast_object_list(position, src=0)
        counts, self._state.max_duration = position[0]
        self._adopt(counts, counts["epoch"])
        if self._averages.exist:
            averages = [self._received_averages]
            dist.broadcast_object_list(averages, src=0)
            self._averages.load_state_dict(*averages[0], logger)
        self._received_averages = [], False
        schedules = [self._schedules.state_dict()]
        dist.broadcast_object_list(schedules, src=0)
        self._schedules.load_from_rank_0(schedules[0])

    def _load_position(self, saved: dict[str, Any]) -> None:
        self._adopt(saved["timestamp"])
        self._schedules.load_state_dict(saved["schedules"])
        if saved["is_in_batch"] and not self._is_in_batch():
            # This group joins before its first batch, and the donor is inside a batch that it has
            # not counted yet: continue at the position after that batch.
            self._schedules.end_batch(saved["ends_epoch"])
            now = self._state.timestamp
            samples = now.sample.value // max(1, now.batch.value)
            tokens = now.token.value // max(1, now.batch.value)
            self._adopt(_counts(now.to_next_batch(samples=samples, tokens=tokens)))
        is_before_first = not self._state.timestamp.batch_in_epoch.value and not self._is_in_batch()
        if self._is_new and is_before_first:
            self._load_epoch(saved)
        batch = self._state.timestamp.batch.value
        log.info("Continuing at batch %d, like the other replica groups", batch)

    def _ends_epoch(self) -> bool:
        """Whether the batch that is not counted yet is the last one of its epoch."""
        num_batches, done = self._state.dataloader_len, self._state.timestamp.batch_in_epoch
        return num_batches is not None and done.value + 1 == num_batches.value

    def _load_epoch(self, saved: dict[str, Any]) -> None:
        """Begin in the donor's epoch, and end at the donor's last batch.

        The donor is in the middle of its epoch, and this group has all of it before it. With the
        same number of epochs left, all others would wait at the end for this group.
        """
        epoch, ends_at = saved["timestamp"]["epoch"] + saved["ends_epoch"], saved["ends_at"]
        self._adopt(_counts(self._state.timestamp), epoch)
        if self._ends_by_epoch and ends_at is not None:
            self._state.max_duration = f"{ends_at}ba"
            log.info("Beginning in epoch %d, ending at batch %d with the others", epoch, ends_at)

    def _adopt(self, counts: dict[str, int], epoch: int | None = None) -> None:
        """Set the counters of the timestamp, but keep the position within the epoch.

        With another position, Composer would fetch every batch before it.

        Args:
            counts: The donor's counters.
            epoch: The epoch to set. None: keep this group's.
        """
        own = self._state.timestamp
        donor = Timestamp()
        donor.load_state_dict(counts)
        # A new object, since savers keep references to the old one.
        self._state.timestamp = donor.copy(
            epoch=own.epoch if epoch is None else epoch,
            batch_in_epoch=own.batch_in_epoch,
            sample_in_epoch=own.sample_in_epoch,
            token_in_epoch=own.token_in_epoch,
            total_wct=own.total_wct,
            epoch_wct=own.epoch_wct,
            iteration_wct=own.iteration_wct,
            batch_wct=own.batch_wct,
        )


def _counts(timestamp: Timestamp) -> dict[str, int]:
    """Return the counters of a timestamp, without its clocks: they are each group's own."""
    return {name: n for name, n in timestamp.state_dict().items() if isinstance(n, int)}


class Schedules:
    """Saves the states of the job's schedulers, and loads those of a donor.

    torch's schedulers count their own steps. Composer's are functions of the timestamp, in one of
    torch's whose count they do not read.

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

    def load_state_dict(self, saved: SchedulerStates) -> None:
        """Load the donor's states. If one cannot be loaded, none is, and a warning says why."""
        states, rates = saved
        schedulers = self._state.schedulers
        own = [type(each).__name__ for each in schedulers]
        if own == [kind for kind, state in states if state] and len(rates) == len(self._groups()):
            for scheduler, (_, state) in zip(schedulers, states, strict=True):
                scheduler.load_state_dict(state or {})
            self._set(rates)
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "Schedulers keep their own state, not the donor's: it has sent those of %s for %d "
                "groups of parameters, and this group has %s for %d. Use the same, whose states "
                "are numbers and plain containers",
                [kind for kind, state in states if state],
                len(rates),
                own,
                len(self._groups()),
            )

    def load_from_rank_0(self, saved: SchedulerStates) -> None:
        """Load the states and all learning rates of rank 0 of this group."""
        self.load_state_dict(saved)
        if self._state.schedulers:
            self._set(saved[1])

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
