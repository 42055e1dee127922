"""A replica group's membership in a run that has a coordinator."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from typing import Any

from torch import Tensor

from composer_replication import __version__
from composer_replication.coordinator.client import (
    CoordinatorAwayError,
    CoordinatorClient,
    NameTakenError,
    RejectedByCoordinatorError,
)
from composer_replication.coordinator.wire_types import CommitReport, RunInfo
from composer_replication.diloco.fragments import described_tensors, model_fingerprint
from composer_replication.options import ReplicaEnv, ReplicaOptions, replica_id_of
from composer_replication.replica.ranks import ask_on_rank_0
from composer_replication.util.fence import fence
from composer_replication.util.json_files import finite

log = logging.getLogger(__name__)


def ask_for_run(options: ReplicaOptions) -> RunInfo:
    """Ask the coordinator about the run, on rank 0, and return the answer on every rank.

    Args:
        options: Of this group, with ``coordinator_addr``.

    Raises:
        CoordinatorAwayError: It does not answer.
        SettingsMismatch: It lacks a setting that this version has, or the other way round.
        ValueError: It rejects the token.
    """
    with closing(client_of(options)) as client:
        return ask_on_rank_0(client.info)


class Membership:
    """Registers a replica group with the coordinator for one fit, and reports its progress.

    Make one on every rank of the group: rank 0 registers, and every rank gets its error if it
    cannot. From then on a thread of rank 0 sends the heartbeats, and repeats the newest commit
    report until it has arrived. Training never waits for that thread, and goes on while the
    coordinator is away.

    Args:
        options: Of this group, with ``coordinator_addr``.
        info: What the coordinator says about the run.
        synced: The synchronised tensors by name, of each fragment. Their fingerprint is registered.
        world_size: Ranks of this group.

    Attributes:
        client: This rank's connection to the coordinator, closed by ``leave``.
        replica_id: The group's name.
        session: The session of the registration, on rank 0.

    Raises:
        CoordinatorAwayError: The coordinator does not answer.
        RejectedByCoordinatorError: It rejects; the message says why.
    """

    HEARTBEATS_IN_LIMIT = 3
    """How many heartbeats a group sends in the silence after which the coordinator would count it
    as dead."""

    def __init__(
        self,
        options: ReplicaOptions,
        info: RunInfo,
        synced: Sequence[Mapping[str, Tensor]],
        world_size: int,
    ) -> None:
        self.client = client_of(options)
        self.replica_id = replica_id_of(options)
        self.session = uuid.uuid4().hex
        self._timeout_s = info.heartbeat_timeout_s
        self._registration = {
            "replica_id": self.replica_id,
            "session": self.session,
            "host": socket.gethostname(),
            "world_size": world_size,
            "composer_replication": __version__,
            "torchft": version("torchft-nightly"),
            "model": model_fingerprint(synced),
            "tensors": described_tensors(synced),
        }
        # The thread and training share these. Each is replaced as a whole, so they need no lock.
        self._progress: Mapping[str, Any] = {}
        self._report: CommitReport | None = None
        self._sent: CommitReport | None = None
        self._refusal: ValueError | None = None
        self._left = threading.Event()
        self._away = ""  # why the coordinator is away, as it was logged
        self._has_complained = False
        self._thread: threading.Thread | None = None
        try:
            ask_on_rank_0(self._register)
        except BaseException:
            self.client.close()
            raise

    def _register(self) -> None:
        self._register_name()
        self._thread = threading.Thread(target=self._report_all, name="membership", daemon=True)
        self._thread.start()

    def _register_name(self) -> None:
        # A group that was started again waits until its predecessor looks dead. So does a group in
        # training whose coordinator has come back with an earlier session on its record.
        self.client.with_limits(self._timeout_s + 1.0).retry(
            lambda: self.client.register(self._registration), on=NameTakenError
        )

    def check(self) -> None:
        """Check that this group is still registered. A collective of the group's ranks.

        Every rank gets the same error: an error of rank 0 alone would leave the other ranks waiting
        for it in their next collective.

        Raises:
            RejectedByCoordinatorError: Another group has this one's name.
        """
        ask_on_rank_0(self._raise_refusal)

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def report_progress(self, progress: Mapping[str, Any]) -> None:
        """Set what the next heartbeat reports, without numbers that JSON does not have."""
        self._progress = finite(progress)

    def report_commit(self, report: CommitReport) -> None:
        """Send a report after the next heartbeat, instead of one that has not arrived yet."""
        self._report = report

    def send_report(self, client: CoordinatorClient) -> None:
        """Send the newest commit report now, unless it has arrived.

        Two threads may do so at the same time: reports may be repeated, and arrive in any order.

        Args:
            client: With the limits of this request.

        Raises:
            CoordinatorAwayError: The coordinator does not answer.
        """
        report = self._report
        if report is None or report is self._sent:
            return
        try:
            unknown = client.commit(report)
        except RejectedByCoordinatorError as error:
            unknown = []
            log.error("The record of trained samples is wrong from here on: %s", error)
        if unknown and not self._has_complained:
            self._has_complained = True
            log.error(
                "The coordinator runs on another state folder than before, or an older copy of it, "
                "and has lost leases. Training goes on; its record of samples is incomplete"
            )
        self._sent = report

    def leave(self) -> None:
        """End the registration. No report is sent after this."""
        self._left.set()
        if self._thread is not None:
            self._thread.join(5.0)
            try:
                self.client.with_limits(retry_s=0.0).leave(self.replica_id, self.session)
            except (CoordinatorAwayError, RejectedByCoordinatorError) as error:
                log.info("Could not notify the coordinator on exit: %s", error)
        self.client.close()

    # ---- the thread -----------------------------------------------------------------------

    def _report_all(self) -> None:
        last = time.monotonic()
        interval_s = self._timeout_s / self.HEARTBEATS_IN_LIMIT
        while not self._left.wait(last + interval_s - time.monotonic()):
            last = time.monotonic()
            # An error that nobody has foreseen costs one heartbeat, not all that follow.
            with fence("the coordinator how this group is doing"):
                self._report_once()
            if self._refusal is not None:
                return

    def _report_once(self) -> None:
        try:
            # Everything is sent once: the next round is the next attempt.
            self._heartbeat(self.client.with_limits(retry_s=0.0))
            # The coordinator answers heartbeats from memory, and the rest from its database. While
            # that stalls, these two must not delay the next heartbeat past the limit.
            self.send_report(self.client.with_limits(retry_s=0.0, timeout_s=self._timeout_s / 3))
            if self._away:
                log.info("The coordinator is back")
            self._away = ""
        except CoordinatorAwayError as error:
            if self._away != str(error):  # one that has come back may have another token
                log.warning("Training goes on without the coordinator: %s", error)
            self._away = str(error)
        except RejectedByCoordinatorError as error:
            self._refusal = error

    def _heartbeat(self, client: CoordinatorClient) -> None:
        try:
            progress = {"session": self.session, **self._progress}
            client.heartbeat(self.replica_id, progress)
        except RejectedByCoordinatorError as error:
            # The coordinator has lost its state, or another group has this one's name. In the
            # latter case it rejects the registration too.
            self._register_name()
            log.warning("Registered again: %s", error)


def client_of(options: ReplicaOptions) -> CoordinatorClient:
    """Return a connection to this group's coordinator."""
    assert options.coordinator_addr is not None, "asked only where there is one"
    token = ReplicaEnv.from_env(os.environ).token
    return CoordinatorClient(options.coordinator_addr, token)
