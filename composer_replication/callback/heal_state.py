"""The part of a heal that belongs to the Composer job.

A joiner gets it beside the global state: the position in training, torch's schedulers, the averages
of EMA and SWA, and, with ``heal_inner_state: donor``, the inner optimizer's state.
"""

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
from composer_replication.diloco.fingerprints import SettingsMismatch
from composer_replication.diloco.inner_optimizer import load_state, save_state

log = logging.getLogger(__name__)


class HealState:
    """Saves and loads the state of a Composer job that torchft's heal sends to a joiner.

    Args:
        state: Composer's state.
        heal_inner_state: ``own`` or ``donor``, see ``ReplicaOptions``.
        is_in_batch: Returns whether this group is inside a batch that it has not counted yet.
        averages: The job's EMA and SWA.

    Raises:
        ValueError: ``heal_inner_state`` is ``donor``, and the inner optimizer's state is sharded,
            so that no rank has all of it.
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
        self._has_healed = False
        self._received_inner: list[dict[str, Any]] | None = None
        if self._wants_inner_state and any(
            isinstance(p, DTensor) for p in state.model.parameters()
        ):
            raise ValueError(
                "heal_inner_state='donor' with FSDP: a rank has only its own shard of the inner "
                "optimizer's state. Use heal_inner_state='own'"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a joiner: averages and inner optimizer state on rank 0 only."""
        is_rank_0 = dist.get_global_rank() == 0
        sends_inner = self._wants_inner_state and is_rank_0
        inner = save_state(self._state.optimizers[0]) if sends_inner else None
        return {
            "timestamp": _counts(self._state.timestamp),
            "is_in_batch": self._is_in_batch(),
            "ends_epoch": self._is_in_batch() and self._ends_epoch(),
            "ends_at": max_batches(self._state),
            "schedules": self._schedules.state_dict(),
            "inner_optimizer": inner,
            "averages": self._averages.state_dict() if is_rank_0 else [],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at the donor's position, so that both groups end at the same batch.

        Args:
            saved: What ``state_dict`` returned in the donor.

        Raises:
            SettingsMismatch: This group wants an inner optimizer state, and the donor sent none.
        """
        self._has_healed = True
        # EMA and SWA also update at the end of this batch, which would change the donor's averages:
        # broadcast_from_rank_0 loads them after that.
        misses_an_update = saved["is_in_batch"] or self._is_in_batch()
        self._received_averages = saved["averages"], misses_an_update
        self._load_position(saved)
        self._received_inner = saved["inner_optimizer"]
        wants = self._wants_inner_state and dist.get_global_rank() == 0
        if wants and self._received_inner is None:
            raise SettingsMismatch(
                "this group has heal_inner_state='donor', and the replica groups in training have "
                "'own': make them equal"
            )

    def broadcast_from_rank_0(self, logger: Logger) -> None:
        """After a heal, give all ranks of the group what rank 0 has received from its donor.

        torchft picks a donor for each rank. Donors can be at different batches, if some have
        skipped steps, and inner states of several donors would make the ranks differ.

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
        if self._wants_inner_state:
            inner = [self._received_inner]
            dist.broadcast_object_list(inner, src=0)
            assert inner[0] is not None, "rank 0 has rejected a donor without it"
            load_state(self._state.optimizers[0], inner[0])
            self._received_inner = None
        # This comes last: the donor's optimizer state contains the learning rates of a batch that
        # has ended since.
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
