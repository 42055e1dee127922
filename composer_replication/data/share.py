"""A replica group's share of the data, for the callback: under a coordinator or without one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from composer import State
from composer.core import TimeUnit

from composer_replication.data.fixed_shards import FixedShards
from composer_replication.data.leases import DataLeases
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.data.sample_stream import Place
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.sample_ledger import check_keeps_all_steps
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.replica.options import ReplicaOptions, replica_id_of

log = logging.getLogger(__name__)


class DataShare:
    """What a group reads of a dataset that is shared out, and where it stands in that.

    Args:
        loader: Of this rank.
        options: Of this group.
        leases: From the coordinator; None for a fixed share.
    """

    POLL_S = 0.2

    def __init__(
        self, loader: ReplicaDataLoader, options: ReplicaOptions, leases: DataLeases | None
    ) -> None:
        self._loader = loader
        self._options = options
        self._leases = leases
        self._loaded = Place()
        self._epoch, self._is_last_epoch = 0, False
        self._diloco: DiLoCo | None = None
        self._steps_before = 0
        loader.pause()

    @classmethod
    def of(
        cls,
        state: State,
        options: ReplicaOptions,
        settings: DiLoCoSettings | None = None,
        session: str | None = None,
    ) -> DataShare | None:
        """The share of a job, if its training loader is a ``ReplicaDataLoader``.

        Args:
            state: Composer's.
            options: Of this group.
            settings: The run's, if a coordinator gives out the samples.
            session: Of this group's registration with it; None on other ranks than 0.

        Raises:
            CoordinatorAwayError: The coordinator does not answer.
            RefusedByCoordinatorError: It knows the dataset as another one.
            ValueError: Samples would count as trained whose steps are thrown away.
        """
        loader: Any = state.train_dataloader
        if not isinstance(loader, ReplicaDataLoader):
            return None
        if settings is not None:
            check_keeps_all_steps(settings)
        if state.max_duration is not None and state.max_duration.unit == TimeUnit.EPOCH:
            log.info(
                "Schedules count an epoch as %d batches, as if this group read all of it; state "
                "them in batches to fit its share",
                len(loader),
            )
        return cls(loader, options, DataLeases(options, loader, session) if settings else None)

    @property
    def place(self) -> Place:
        """Where in the stream the samples of the last batch end."""
        return self._loader.place

    def place_state(self) -> dict[str, int]:
        """Where those end that have been trained on: for a checkpoint, or after a fit that failed.

        Inside a batch that has not come to its inner step this is before the batch.
        """
        steps = self._diloco.inner_steps if self._diloco is not None else 0
        before = self._loader.before if steps <= self._steps_before else None
        return asdict(before or self._loader.place)

    def load_place(self, reading: Mapping[str, Any]) -> None:
        """Take it from one."""
        self._loaded = Place(reading.get("number", 0), reading["position"])

    def start(self, diloco: DiLoCo, stream: int, stand_by: Callable[[], None]) -> None:
        """Begin to read, once the group has joined the others.

        Args:
            diloco: Which has joined.
            stream: The checkpoint's, 0 for none.
            stand_by: Takes part in a sync without samples, on every rank, and tells of it.

        Raises:
            ValueError: The group's name says no share, or see ``DataLeases.start``.
        """
        self._diloco = diloco
        if self._leases is None:
            shards = fixed_shards(self._options, self._loader)
            self._loader.read(shards, self._loaded, lambda: False)
            return
        self._leases.start(diloco, self._loaded, stream, partial(self._has_more, diloco, stand_by))

    def before_batch(self, state: State) -> None:
        """Composer is about to ask for a batch."""
        now, end = state.timestamp, state.max_duration
        self._epoch = now.epoch.value
        in_epochs = end.value if end is not None and end.unit == TimeUnit.EPOCH else None
        self._is_last_epoch = in_epochs is not None and self._epoch + 1 >= in_epochs
        if self._diloco is not None:
            self._steps_before = self._diloco.inner_steps
        self._loader.begin(self._epoch, now.batch_in_epoch.value)

    def after_batch(self) -> None:
        """It has been trained on, also if its inner step was skipped."""
        self._loader.before = None

    def _has_more(self, diloco: DiLoCo, stand_by: Callable[[], None]) -> bool:
        """Where the stream pauses: stay with the others until there is more, or no more."""
        assert self._leases is not None, "it asks"
        while True:
            with diloco.waiting_for_others():  # the coordinator may be away
                found = self._leases.look(self._epoch, self._is_last_epoch)
            if found != "stand by":
                return found == "more"
            outer_step, reader = diloco.outer_step, self._loader.reader
            stand_by()
            if self._loader.reader is not reader:
                return True  # healed, with another stream to read
            if self._loader.is_closed:
                self._leases.begin_stream(diloco)
                return True
            if diloco.outer_step == outer_step:
                time.sleep(self.POLL_S)

    def tell_sync(self, diloco: DiLoCo) -> None:
        """After a sync."""
        if self._leases is not None:
            self._leases.tell_sync(diloco)

    def end(self, diloco: DiLoCo) -> None:
        """Training is over."""
        if self._leases is not None:
            self._leases.end(diloco)

    def close(self) -> None:
        """Read no more."""
        self._loader.pause()
        if self._leases is not None:
            self._leases.close()


def fixed_shards(options: ReplicaOptions, loader: ReplicaDataLoader) -> FixedShards:
    """Without a coordinator: this group's own units.

    Raises:
        ValueError: The group's name is no number, or there are fewer units than groups.
    """
    replica_id, num_replicas = replica_id_of(options), options.num_replicas or 1
    if not replica_id.isdecimal() or int(replica_id) >= num_replicas:
        raise ValueError(
            f"replica_id={replica_id!r} says no share of the data: number the {num_replicas} "
            f"groups 0 to {num_replicas - 1}, or use a coordinator"
        )
    return FixedShards(loader.spec, int(replica_id), num_replicas)
