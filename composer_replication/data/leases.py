"""How a replica group comes by its samples: leased from the coordinator, or a fixed share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from composer.utils import dist
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_when_event_set,
    wait_exponential,
)
from tenacity.stop import StopBaseT

from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.coordinator.client_http import CoordinatorAwayError
from composer_replication.coordinator.membership import client_of
from composer_replication.coordinator.wire_types import Lease
from composer_replication.data.commit_reports import CommitReports
from composer_replication.data.loader import ReplicaDataLoader
from composer_replication.data.sample_stream import Place
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.replica.options import ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import ask_on_rank_0

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class DataLeases:
    """Connects a group's loader with the coordinator's work units and with the syncs.

    Every rank asks for the leases of the group's stream itself, and gets the same ones; all else is
    said by rank 0.

    Args:
        options: Of this group, with ``coordinator_addr``.
        loader: Of this rank.
        session: The group's registration; rank 0 has it.

    Raises:
        CoordinatorAwayError: The coordinator does not answer.
        RefusedByCoordinatorError: It knows this dataset as another one.
    """

    END_PATIENCE_S = 30.0
    """How long the coordinator may be away when training ends."""

    def __init__(
        self, options: ReplicaOptions, loader: ReplicaDataLoader, session: str | None
    ) -> None:
        self._client = client_of(options)
        self._loader = loader
        self._session = session
        self._replica_id = replica_id_of(options)
        self._ended = threading.Event()
        self._patience = Patience(stop_when_event_set(self._ended))
        self._stream = 0
        self._num_streams = 0
        self._reports = CommitReports(self._client) if dist.get_global_rank() == 0 else None
        ask_on_rank_0(lambda: self._client.create_dataset(loader.spec))

    def start(self, diloco: DiLoCo, place: Place, before: int, wait: Callable[[], bool]) -> None:
        """Begin to read, once the group has joined the others.

        Where all groups start, the coordinator hears which samples their model has. A group that
        goes on where its checkpoint was reads on in its stream; else it gives back what that had
        and begins another.

        Args:
            diloco: Which has joined.
            place: In the checkpoint's stream.
            before: The checkpoint's stream, 0 for none.
            wait: Called on every rank when the stream pauses; see ``ReplicaDataLoader.read``.

        Raises:
            CoordinatorAwayError: The coordinator does not answer.
            RefusedByCoordinatorError: The checkpoint's samples are leased to others, or it does
                not know the stream.
        """
        self._wait = wait

        def begin() -> None:
            if not diloco.has_joined_others:
                self._client.rewind(diloco.outer_step, diloco.ledger())
            if diloco.stream:
                assert self._session is not None, "rank 0 has registered"
                self._client.reopen_stream(diloco.stream, place.position, self._session)

        ask_on_rank_0(begin)
        if diloco.stream:
            self._stream = diloco.stream
            self._read(place)
        else:
            self._stream = before
            self.begin_stream(diloco)

    def begin_stream(self, diloco: DiLoCo) -> None:
        """Give back what the model does not have of the stream so far, and read another one."""
        self._stream = ask_on_rank_0(lambda: self._patience.with_(lambda: self._exchange(diloco)))
        diloco.read_from(self._stream)
        self._read(Place())

    def _exchange(self, diloco: DiLoCo) -> int:
        assert self._session is not None, "rank 0 has registered"
        if self._stream:
            self._client.release_stream(self._stream, diloco.ledger())
        name = f"{self._session}/{self._num_streams}"
        dataset_id = self._loader.spec.dataset_id
        stream = self._client.open_stream(name, dataset_id, self._replica_id, self._session)
        self._num_streams += 1
        return stream

    def _read(self, place: Place) -> None:
        source = StreamLeases(self._client, self._stream, self._patience)
        self._loader.read(source, place, self._wait)

    def tell_sync(self, diloco: DiLoCo) -> None:
        """After a sync: the coordinator is told what it has brought into the model.

        A group that has lost steps in it reads another stream from now on.
        """
        if self._reports is not None:
            self._reports.tell(diloco.outer_step, diloco.ledger(), diloco.streams_in_last_sync())
        if not diloco.stream:
            self.begin_stream(diloco)

    def look(self, epoch: int, is_last_epoch: bool) -> str:
        """What a pause of the stream means: ``more`` samples, the epoch's ``end``, or ``stand by``.

        Between epochs a group goes on at once, and takes what comes back of an earlier one later.
        In the last it stays until all samples are in the model, since those of a group that dies
        would else be trained by nobody.
        """
        return ask_on_rank_0(lambda: self._look(epoch, is_last_epoch))

    def _look(self, epoch: int, is_last_epoch: bool) -> str:
        assert self._reports is not None, "rank 0 looks"
        if self._loader.is_closed:
            return "stand by"  # others have committed without us: the next sync heals us
        if not is_last_epoch:
            return "end"
        self._patience.with_(self._reports.flush)
        dataset_id = self._loader.spec.dataset_id
        epochs = self._patience.with_(lambda: self._client.progress(dataset_id))
        begun = [told for told in epochs if told["epoch"] <= epoch]
        if all(told["done"] == told["length"] for told in begun):
            return "end"
        return "more" if any(told["available"] for told in begun) else "stand by"

    def end(self, diloco: DiLoCo) -> None:
        """Training is over: say what the model has, and give back the rest."""
        if self._reports is None or not self._stream:
            return
        try:
            self._reports.tell(diloco.outer_step, diloco.ledger(), diloco.streams_in_last_sync())
            patience = Patience(stop_after_delay(self.END_PATIENCE_S))
            patience.with_(self._reports.flush)
            patience.with_(lambda: self._client.release_stream(self._stream, diloco.ledger()))
        except (CoordinatorAwayError, ValueError) as error:
            log.warning("The coordinator has not heard of the last syncs: %s", error)

    def close(self) -> None:
        """Ask and tell no more."""
        self._ended.set()
        if self._reports is not None:
            self._reports.close()
        self._client.close()


class Patience:
    """Asks again as long as the coordinator is away, and says so.

    Args:
        stop: When to give up.
    """

    SAY_AT = (4, 20)
    """Attempts; then every hundredth."""

    def __init__(self, stop: StopBaseT) -> None:
        self._retrying = Retrying(
            retry=retry_if_exception_type(CoordinatorAwayError),
            stop=stop,
            wait=wait_exponential(0.1, max=1.0),
            before_sleep=self._say,
            reraise=True,
        )

    def with_(self, call: Callable[[], Answer]) -> Answer:
        """What the call returns, once the coordinator is back."""
        return self._retrying.copy()(call)

    def _say(self, attempt: RetryCallState) -> None:
        number = attempt.attempt_number
        if number in self.SAY_AT or number % 100 == 0:
            outcome = attempt.outcome
            error = outcome.exception() if outcome is not None else None
            log.warning("Waiting for samples since %.0f s: %s", attempt.seconds_since_start, error)


class StreamLeases:
    """The leases of one stream, from the coordinator.

    Args:
        client: Asks it.
        stream: Which stream.
        patience: While it is away.
    """

    def __init__(self, client: CoordinatorClient, stream: int, patience: Patience) -> None:
        self._client = client
        self._stream = stream
        self._patience = patience

    def lease(self, number: int, epoch: int) -> Lease:
        """See ``Source``."""
        return self._patience.with_(lambda: self._client.lease(self._stream, number, epoch))
