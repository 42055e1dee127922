"""Connects a group's ``ReplicaDataLoader`` with its syncs, for the callback."""

from __future__ import annotations

import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from composer_replication.coordinator.client import CoordinatorAwayError
from composer_replication.coordinator.membership import Membership
from composer_replication.coordinator.wire_types import CommitReport
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.data.sample_stream import FixedShards, StreamPosition, shard_of
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.sample_ledger import check_keeps_all_steps
from composer_replication.options import ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import (
    Answer,
    ask_on_rank_0,
    await_on_rank_0,
    begin_on_rank_0,
    rank,
)

log = logging.getLogger(__name__)


def group_data_of(
    loader: Any,
    options: ReplicaOptions,
    diloco: DiLoCo,
    membership: Membership | None,
    sync_idle: Callable[[], None],
    epochs: float,
) -> GroupData | None:
    """The data of a job, if its training loader is a ``ReplicaDataLoader``.

    Args:
        loader: The job's training loader.
        options: The group's options.
        diloco: The DiLoCo that will train on the samples.
        membership: The group's membership in a run with a coordinator, which leases the samples;
            None in a run without one.
        sync_idle: See ``LeasedData``.
        epochs: After how many epochs training ends; infinite if it does not end by epochs.

    Raises:
        CoordinatorAwayError: The coordinator does not answer.
        RejectedByCoordinatorError: The dataset's name belongs to another dataset.
        ValueError: Samples would count as trained whose steps are thrown away.
    """
    if not isinstance(loader, ReplicaDataLoader):
        return None
    if epochs < math.inf:
        log.info(
            "Schedules count an epoch as %d batches, as if this group read all of it; state them "
            "in batches to fit the part that it reads",
            len(loader),
        )
    if membership is None:
        return GroupData(loader, diloco, options)
    return LeasedData(loader, diloco, options, membership, sync_idle)


class GroupData:
    """Feeds a loader with a fixed shard of its dataset, and knows up to where it was trained on.

    Args:
        loader: The loader of this rank.
        diloco: The DiLoCo that trains on the samples.
        options: The group's options, which say which shard it reads.
    """

    def __init__(self, loader: ReplicaDataLoader, diloco: DiLoCo, options: ReplicaOptions) -> None:
        self._loader = loader
        self._diloco = diloco
        self._options = options
        self._steps_before = 0
        loader.pause()
        loader.position = StreamPosition()

    @property
    def position(self) -> StreamPosition:
        """The position in the stream after the last batch."""
        return self._loader.position

    def done(self, epochs: float) -> float:
        """The part of the samples of all epochs that is done, 0 to 1; 0 if they are infinite."""
        return min(1.0, self._samples_read / (self._loader.spec.length * epochs))

    @property
    def _samples_read(self) -> float:
        """Trained samples of all groups, if the other groups are as fast as this one."""
        return self.position.samples * (self._options.num_replicas or 1)

    def state_dict(self) -> dict[str, int]:
        """The position after the samples that were trained on, for a checkpoint or another fit.

        Before the inner step of a batch has been taken, this is the position before that batch.
        """
        is_trained = self._diloco.inner_steps > self._steps_before
        before = None if is_trained else self._loader.position_before
        position = before or self._loader.position
        return {"number": position.number, "position": position.samples}

    def load_state_dict(self, reading: Mapping[str, Any]) -> None:
        """Take a position of ``state_dict``, at which ``start`` then begins to read."""
        self._loader.position = StreamPosition(reading.get("number", 0), reading["position"])

    def start(self) -> None:
        """Begin to read, once the group has joined the others.

        Raises:
            ValueError: The group's name does not say which shard it reads.
        """
        groups = self._options.num_replicas or 1
        number = shard_of(replica_id_of(self._options), groups)
        shard = FixedShards(self._loader.spec, number, groups)
        self._loader.read(shard.lease, self.position, lambda: False)

    def before_batch(self, epoch: int, batches_done: int, epochs: float) -> None:
        """Prepare for a batch, before the trainer reads it.

        Args:
            epoch: The epoch, from 0.
            batches_done: Batches of it so far.
            epochs: See ``group_data_of``.
        """
        self._steps_before = self._diloco.inner_steps
        self._loader.begin(epoch, batches_done)

    def after_batch(self) -> None:
        """Note that the last batch is over, also if its inner step was skipped."""
        self._loader.position_before = None

    def after_sync(self) -> None:
        """Called after each sync: with a fixed shard there is nothing to report."""

    def end(self) -> None:
        """Called when training has ended: with a fixed shard there is nothing to do."""

    def close(self) -> None:
        """Stop reading: training is over."""
        self._loader.pause()


class LeasedData(GroupData):
    """Reads samples that the coordinator leases to this group, and reports what was trained on.

    Rank 0 makes all requests, and every rank gets the answers. A group that holds leases trains on
    while the coordinator is away; one that needs a lease then waits until it is back.

    Args:
        loader: The loader of this rank.
        diloco: The DiLoCo that trains on the samples.
        options: The group's options.
        membership: The group's membership in the run, with the connection to the coordinator.
        sync_idle: Called on every rank while the group waits: takes part in the others' next sync
            without samples, and then calls ``after_sync``.

    Raises:
        CoordinatorAwayError: The coordinator does not answer.
        RejectedByCoordinatorError: The dataset's name belongs to another dataset.
        ValueError: Samples would count as trained whose steps are thrown away.
    """

    POLL_S = 0.2
    END_RETRY_S = 30.0
    """How long the coordinator may be away when training ends."""

    def __init__(
        self,
        loader: ReplicaDataLoader,
        diloco: DiLoCo,
        options: ReplicaOptions,
        membership: Membership,
        sync_idle: Callable[[], None],
    ) -> None:
        check_keeps_all_steps(diloco.settings)
        super().__init__(loader, diloco, options)
        self._membership = membership
        self._client = membership.client.with_limits(retry_s=math.inf)
        self._sync_idle = sync_idle
        self._stream = 0  # none so far
        self._epoch = 0
        self._is_last_epoch = False
        ask_on_rank_0(lambda: membership.client.create_dataset(loader.spec))
        log.info("Leases samples of %r, as all groups with a dataset of that name", loader.spec)

    def load_state_dict(self, reading: Mapping[str, Any]) -> None:
        """Take a position of ``state_dict``, in a stream that ``start`` then asks for again."""
        super().load_state_dict(reading)
        self._stream = reading["stream"]

    def start(self) -> None:
        """Begin to read, once the group has joined the others.

        Where all groups start, the coordinator is sent which samples their model has. A group that
        continues from its own checkpoint reads on in that stream. A group that has healed instead
        releases that stream, and opens another one.

        Raises:
            CoordinatorAwayError: The coordinator does not answer.
            RejectedByCoordinatorError: The checkpoint's samples are leased to others by now, or the
                coordinator does not know the stream.
        """
        ask_on_rank_0(self._continue_run)
        if self._diloco.ledger.stream:
            self._read(self._diloco.ledger.stream, self.position)
        else:
            self._open_stream()

    def _continue_run(self) -> None:
        client = self._membership.client
        diloco = self._diloco
        if not diloco.has_joined_others:
            client.rewind(diloco.outer_step, diloco.ledger.rows())
        stream = diloco.ledger.stream
        if stream:
            client.reopen_stream(stream, self.position.samples, self._membership.session)

    def _open_stream(self) -> None:
        """Release the current stream, so that its other samples become available; read another."""
        stream = self._from_coordinator(self._exchange_stream)
        self._diloco.read_from(stream)
        self._read(stream, StreamPosition())

    def _exchange_stream(self) -> int:
        spec = self._loader.spec
        member = self._membership
        if self._stream:
            self._client.release_stream(self._stream, self._diloco.ledger.rows())
        self._client.create_dataset(spec)  # the state folder may be a new one
        name = uuid.uuid4().hex  # the same in each attempt
        return self._client.open_stream(name, spec.dataset_id, member.replica_id, member.session)

    def _read(self, stream: int, position: StreamPosition) -> None:
        self._stream = stream
        source = functools.partial(self._client.lease, stream)
        self._reader = self._loader.read(
            source, position, self._has_more, self._diloco.hang_watch.note_progress
        )

    def _from_coordinator(self, ask: Callable[[], Answer]) -> Answer:
        """What rank 0 hears from the coordinator, however long that is away: it is no hang."""
        return await_on_rank_0(begin_on_rank_0(ask), self._diloco.hang_watch.note_progress)

    def before_batch(self, epoch: int, batches_done: int, epochs: float) -> None:
        """Prepare for a batch, before the trainer reads it."""
        super().before_batch(epoch, batches_done, epochs)
        self._epoch = epoch
        self._is_last_epoch = epoch + 1 >= epochs

    def after_sync(self) -> None:
        """Report the sync. A group that has lost steps in it opens another stream."""
        diloco = self._diloco
        self._membership.report_commit(
            CommitReport(diloco.outer_step, diloco.ledger.rows(), diloco.streams_in_last_sync())
        )
        if not diloco.ledger.stream:
            self._open_stream()

    @property
    def _samples_read(self) -> float:
        """Samples of all groups that are in the model."""
        return sum(position for _, position, _ in self._diloco.ledger.rows())

    def _has_more(self) -> bool:
        """Whether this epoch has more samples for this group, which waits until that is known.

        Between epochs a group continues at once; if samples of an earlier epoch come back, it
        trains on them later. In the last epoch it waits until all samples are in the model:
        otherwise no group would train on the samples of one that dies after the others have ended.
        """
        while True:
            has_more = self._from_coordinator(self._ask_for_more)
            if has_more is not None:
                return has_more
            outer_step = self._diloco.outer_step
            reader = self._reader
            self._sync_idle()
            if self._reader is not reader:
                return True  # this group has healed and opened another stream
            if reader.is_closed and not self._diloco.has_unsynced_steps:
                self._open_stream()
                return True
            if self._diloco.outer_step == outer_step:
                time.sleep(self.POLL_S)

    def _ask_for_more(self) -> bool | None:
        """Whether there are more samples.

        None: other groups train on the last ones, which come back if these groups die.
        """
        if self._reader.is_closed:
            # The others have committed without this group, which the sync heals; or its leases
            # were lost with a state folder, and syncs bring in what it has trained on.
            return None
        if not self._is_last_epoch:
            return False
        self._membership.send_report(self._client)  # the answer to the next request depends on it
        self._client.create_dataset(self._loader.spec)  # the state folder may be a new one
        epochs = self._client.progress(self._loader.spec.dataset_id)
        begun = [epoch for epoch in epochs if epoch["epoch"] <= self._epoch]
        if not begun:
            return True
        if all(epoch["done"] == epoch["length"] for epoch in begun):
            return False
        return True if any(epoch["available"] for epoch in begun) else None

    def end(self) -> None:
        """Training has ended: report the last sync, and release the stream."""
        stream = self._stream
        if rank() or not stream:
            return
        client = self._client.with_limits(retry_s=self.END_RETRY_S)
        try:
            self._membership.send_report(client)
            client.release_stream(stream, self._diloco.ledger.rows())
        except (CoordinatorAwayError, ValueError) as error:
            log.warning("The coordinator has not received the last syncs: %s", error)
