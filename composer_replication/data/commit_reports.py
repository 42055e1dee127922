"""Tells the coordinator which samples are in the model, beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from composer_replication.coordinator.client import CoordinatorClient
from composer_replication.coordinator.client_http import (
    CoordinatorAwayError,
    RefusedByCoordinatorError,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What holds after a sync; a newer one says all that an older one did."""

    time: float
    outer_step: int
    ledger: Sequence[Sequence[int]]
    present: Sequence[int]


class CommitReports:
    """Sends the newest report from a thread of its own, until it has arrived.

    Args:
        client: Asks the coordinator.
    """

    RETRY_S = 0.5

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._newest: Report | None = None
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._is_away = self._has_complained = False
        threading.Thread(target=self._send_all, name="commit-reports", daemon=True).start()

    def tell(self, outer_step: int, ledger: Sequence[Sequence[int]], present: list[int]) -> None:
        """Send this, instead of what has not been sent yet."""
        self._newest = Report(time.monotonic(), outer_step, ledger, present)
        self._wake.set()

    def flush(self) -> None:
        """Send what has not been sent, now.

        Raises:
            CoordinatorAwayError: The coordinator does not answer.
        """
        with self._sending:
            report = self._newest
            if report is None:
                return
            age_s = time.monotonic() - report.time
            try:
                unknown = self._client.commit(
                    report.outer_step, report.ledger, report.present, age_s
                )
            except RefusedByCoordinatorError as error:
                unknown = []
                log.error("The record of trained samples is wrong from here on: %s", error)
            if unknown and not self._has_complained:
                self._has_complained = True
                log.error(
                    "The coordinator does not know the streams %s, which the model has been "
                    "trained on: it runs on another state folder than before. Its record of "
                    "trained samples is wrong; start it on the right one",
                    ", ".join(map(str, unknown)),
                )
            if self._newest is report:
                self._newest = None

    def close(self) -> None:
        """Send no more."""
        self._is_closed = True
        self._wake.set()
        with self._sending:
            self._newest = None

    def _send_all(self) -> None:
        while True:
            self._wake.wait(None if self._newest is None else self.RETRY_S)
            self._wake.clear()
            if self._is_closed:
                return
            try:
                self.flush()
                if self._is_away:
                    log.info("The coordinator is back and knows what has been trained")
                self._is_away = False
            except CoordinatorAwayError:
                self._is_away = True  # the heartbeats have said so
