"""What goes to a joiner beside the global state: the position in training, torch's schedulers, the
averages of EMA and SWA, and, if asked for, the inner optimizer's state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from composer import Logger, State, Timestamp, TimeUnit
from composer.utils import dist
from torch.distributed.tensor import DTensor

from composer_replication.callback.progress import max_batches
from composer_replication.callback.schedules import Schedules
from composer_replication.callback.weight_averages import WeightAverages
from composer_replication.diloco.inner_optimizer import load_state, save_state
from composer_replication.diloco.settings import SettingsMismatch

log = logging.getLogger(__name__)


class Handover:
    """Gives them and takes them, as part of torchft's heal.

    Args:
        state: Composer's.
        heal_inner_state: ``own`` or ``donor``, see ``ReplicaOptions``.
        is_in_batch: Whether this group stands inside a batch that it has not counted yet.
        averages: The job's EMA and SWA.

    Raises:
        ValueError: The inner optimizer's state is sharded, so that no rank has all of it.
    """

    def __init__(
        self,
        state: State,
        heal_inner_state: str,
        is_in_batch: Callable[[], bool],
        averages: WeightAverages,
    ) -> None:
        self._state = state
        self._wants_inner_state = heal_inner_state == "donor"
        self._is_in_batch = is_in_batch
        self._averages = averages
        self._schedules = Schedules(state)
        self._is_new = state.timestamp.batch.value == 0
        end = state.max_duration
        self._ends_by_epoch = end is not None and end.unit == TimeUnit.EPOCH
        self._received_averages: tuple[list[Any], bool] = [], False
        self._has_taken = False
        self._received: list[dict[str, Any]] | None = None
        if self._wants_inner_state and any(
            isinstance(p, DTensor) for p in state.model.parameters()
        ):
            raise ValueError(
                "heal_inner_state='donor' with FSDP: a rank has only its own shard of the inner "
                "optimizer's state. Use heal_inner_state='own'"
            )

    def give(self) -> dict[str, Any]:
        """What a joiner gets. Rank 0 alone gives averages and the inner optimizer's state."""
        is_rank_0 = dist.get_global_rank() == 0
        gives = self._wants_inner_state and is_rank_0
        inner = save_state(self._state.optimizers[0]) if gives else None
        return {
            "timestamp": _counts(self._state.timestamp),
            "is_in_batch": self._is_in_batch(),
            "ends_epoch": self._is_in_batch() and self._ends_epoch(),
            "ends_at": max_batches(self._state),
            "schedules": self._schedules.give(),
            "inner_optimizer": inner,
            "averages": self._averages.give() if is_rank_0 else [],
        }

    def take(self, saved: dict[str, Any]) -> None:
        """Stand where the donor stands, so that both end at the same batch.

        Raises:
            SettingsMismatch: The donor gives no inner optimizer state, and it is wanted.
        """
        self._has_taken = True
        # The averages are taken at the end of the batch, after their own updates in it.
        misses_an_update = saved["is_in_batch"] or self._is_in_batch()
        self._received_averages = saved["averages"], misses_an_update
        self._take_position(saved)
        self._received = saved["inner_optimizer"]
        wants = self._wants_inner_state and dist.get_global_rank() == 0
        if wants and self._received is None:
            raise SettingsMismatch(
                "heal_inner_state='donor' here, and the replica groups in training have 'own': "
                "make them equal"
            )

    def level_ranks(self, logger: Logger) -> None:
        """What rank 0's donor gave, for all ranks of the group, if there has been a heal.

        torchft picks a donor for each rank. Donors may stand at different batches, when some have
        skipped steps; and inner states of several would make the ranks differ.
        """
        if not self._has_taken:
            return
        self._has_taken = False
        position = [(_counts(self._state.timestamp), self._state.max_duration)]
        dist.broadcast_object_list(position, src=0)
        counts, self._state.max_duration = position[0]
        self._adopt(counts, counts["epoch"])
        if self._averages.exist:
            given = [self._received_averages]
            dist.broadcast_object_list(given, src=0)
            self._averages.take(*given[0], logger)
        self._received_averages = [], False
        schedules = [self._schedules.give()]
        dist.broadcast_object_list(schedules, src=0)
        if self._wants_inner_state:
            received = [self._received]
            dist.broadcast_object_list(received, src=0)
            assert received[0] is not None, "rank 0 has refused a donor without it"
            load_state(self._state.optimizers[0], received[0])
            self._received = None
        # Last: the donor's optimizer had the learning rates of a batch that has ended by now.
        self._schedules.level(schedules[0])

    def _take_position(self, saved: dict[str, Any]) -> None:
        self._adopt(saved["timestamp"])
        self._schedules.take(saved["schedules"])
        if saved["is_in_batch"] and not self._is_in_batch():
            # We join before our first batch, the donor is inside one that it has not counted yet:
            # stand where it will stand.
            self._schedules.end_batch(saved["ends_epoch"])
            now = self._state.timestamp
            samples = now.sample.value // max(1, now.batch.value)
            tokens = now.token.value // max(1, now.batch.value)
            self._adopt(_counts(now.to_next_batch(samples=samples, tokens=tokens)))
        is_before_first = not self._state.timestamp.batch_in_epoch.value and not self._is_in_batch()
        if self._is_new and is_before_first:
            self._take_epoch(saved)
        batch = self._state.timestamp.batch.value
        log.info("Continuing at batch %d, where the other replica groups are", batch)

    def _ends_epoch(self) -> bool:
        """Whether the batch that is not counted yet is the last one of its epoch."""
        num_batches, done = self._state.dataloader_len, self._state.timestamp.batch_in_epoch
        return num_batches is not None and done.value + 1 == num_batches.value

    def _take_epoch(self, saved: dict[str, Any]) -> None:
        """Before the first batch: begin in the donor's epoch, and end with the donor.

        The donor is somewhere in that epoch. With as many epochs left, all others would stand still
        at the end until this group has made up for that.
        """
        epoch, ends_at = saved["timestamp"]["epoch"] + saved["ends_epoch"], saved["ends_at"]
        self._adopt(_counts(self._state.timestamp), epoch)
        if self._ends_by_epoch and ends_at is not None:
            self._state.max_duration = f"{ends_at}ba"
            log.info("Beginning in epoch %d, ending at batch %d with the others", epoch, ends_at)

    def _adopt(self, counts: dict[str, int], epoch: int | None = None) -> None:
        """The position within the epoch stays: Composer would fetch every skipped batch.

        So does the epoch, if none is given.
        """
        own = self._state.timestamp
        donor = Timestamp()
        donor.load_state_dict(counts)
        # A new object: savers keep references to the old one.
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
    """The counters of a timestamp; its clocks are each group's own, and no plain numbers."""
    return {name: n for name, n in timestamp.state_dict().items() if isinstance(n, int)}
