"""The requests of a replica group to the coordinator, and the checks of its answers."""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import tenacity

from composer_replication.coordinator.wire_types import (
    SIGN,
    CommitReport,
    DatasetSpec,
    Lease,
    RunInfo,
)
from composer_replication.options import DuplicateIdError
from composer_replication.settings import DiLoCoSettings, SettingsMismatch

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class CoordinatorAwayError(ConnectionError):
    """The coordinator does not answer, or something else answers at its address.

    One that has another token than before, since it has lost its state folder, is away too.
    """


class RejectedByCoordinatorError(ValueError):
    """The coordinator rejects a request; the message says why."""


class NameTakenError(RejectedByCoordinatorError, DuplicateIdError):
    """A living replica group, or another dataset, has the name."""


class CoordinatorClient:
    """A group's requests to the coordinator. Several threads may use it.

    Every method of a request raises ``CoordinatorAwayError`` if nobody has answered for
    ``retry_s``, and ``RejectedByCoordinatorError`` with the reason if the coordinator rejects.

    Args:
        address: ``http://host:port`` or ``https://host:port``. The certificate of an ``https``
            server is checked against the authorities that httpx knows, or those in the file
            ``SSL_CERT_FILE``.
        token: The run's secret, if it has one.
        retry_s: How long a request that nobody answers is repeated, in seconds, and at least
            ``ATTEMPTS`` times. 0: it is sent once. ``math.inf``: until ``close``.

    Raises:
        ValueError: The address is no URL.
    """

    TIMEOUT_S = 5.0
    ATTEMPTS = 3
    """A laden machine answers late: the first request may take up all of ``retry_s``."""
    LOG_AT = (4, 20)
    """The attempts at which a wait is logged; after these every hundredth one."""

    def __init__(self, address: str, token: str | None, retry_s: float = 5.0) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError(
                f"coordinator_addr={address!r}: write http://{address}, in the argument or in "
                "COMPOSER_REPLICATION_COORDINATOR"
            )
        self.address = address
        self._retry_s, self._timeout_s = retry_s, self.TIMEOUT_S
        self._closed = threading.Event()
        self._is_accepted = threading.Event()  # the token is; events, since copies share them
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # The transport reads SSL_CERT_FILE. The client's trust_env would also read proxies from the
        # environment: groups connect directly.
        try:
            self._client = httpx.Client(
                base_url=address, headers=headers, trust_env=False, transport=httpx.HTTPTransport()
            )
        except httpx.InvalidURL as error:  # which is no ValueError
            raise ValueError(
                f"coordinator_addr={address!r}: {error}. Use http://host:port, in the argument or "
                "in COMPOSER_REPLICATION_COORDINATOR"
            ) from None

    def with_limits(self, retry_s: float, timeout_s: float = TIMEOUT_S) -> Self:
        """The same connection with another ``retry_s``, and another timeout of one request."""
        limited = copy.copy(self)
        limited._retry_s, limited._timeout_s = retry_s, timeout_s
        return limited

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request, and repeat it while nobody answers. Arguments and errors: ``once``."""
        return self.retry(lambda: self.once(method, path, body))

    def retry(
        self,
        call: Callable[[], Answer],
        on: type[Exception] = CoordinatorAwayError,
    ) -> Answer:
        """Repeat a call while it raises an error, up to ``retry_s``, with a back-off.

        Every wait for the coordinator is in this method.
        """
        enough = tenacity.stop_after_attempt(self.ATTEMPTS if self._retry_s else 1)
        is_late = tenacity.stop_after_delay(self._retry_s) & enough
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(on),
            stop=is_late | tenacity.stop_when_event_set(self._closed),
            wait=tenacity.wait_exponential(0.1, max=1.0),
            sleep=tenacity.sleep_using_event(self._closed),
            before_sleep=self._log_wait,
            reraise=True,
        )
        return retrying(call)

    def _log_wait(self, attempt: tenacity.RetryCallState) -> None:
        number, outcome = attempt.attempt_number, attempt.outcome
        if outcome is not None and (number in self.LOG_AT or number % 100 == 0):
            seconds, error = attempt.seconds_since_start, outcome.exception()
            log.warning("Waiting for the coordinator since %.0f s: %s", seconds, error)

    def once(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request once.

        A login page, a proxy's error or a redirect does not come from the coordinator. Whatever
        does not have its ``SIGN`` counts as no answer, so that it ends neither a thread nor a
        group.

        Args:
            method: ``GET``, ``POST`` or ``DELETE``.
            path: From ``/v1`` on, quoted.
            body: Sent as JSON.

        Returns:
            The answer, a JSON object.

        Raises:
            CoordinatorAwayError: There is no such answer.
            RejectedByCoordinatorError: The coordinator rejects; ``NameTakenError`` for status 409.
        """
        try:
            response = self._client.request(method, path, timeout=self._timeout_s, json=body)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: another thread closed it
            raise CoordinatorAwayError(
                f"no coordinator answers at {self.address} ({error}). Start one with "
                "`composer-replication coordinator CONFIG`, or correct "
                "COMPOSER_REPLICATION_COORDINATOR (coordinator_addr=...)"
            ) from None
        answer: dict[str, Any] = {}
        if SIGN in response.headers:
            with suppress(ValueError):  # text, for an error that it has not foreseen
                answer = response.json()
        if answer and response.is_success:
            self._is_accepted.set()
            return answer
        detail = answer.get("detail", _described(response))
        if answer and response.status_code == 401 and self._is_accepted.is_set():
            have_token = "Authorization" in self._client.headers
            fix = "with that of its groups (--token-file)" if have_token else "with --no-token"
            raise CoordinatorAwayError(
                f"the coordinator at {self.address} has another token than before: start it again "
                f"{fix}"
            )
        if answer and response.is_client_error:
            refusal = NameTakenError if response.status_code == 409 else RejectedByCoordinatorError
            raise refusal(f"the coordinator at {self.address} rejects: {detail}")
        raise CoordinatorAwayError(f"the coordinator at {self.address} cannot serve: {detail}")

    def close(self) -> None:
        """Close the connection, and end every wait for the coordinator in other threads."""
        self._closed.set()
        self._client.close()

    # ---- the run ------------------------------------------------------------------------------

    def info(self) -> RunInfo:
        """What a group has to know before it starts.

        Raises:
            SettingsMismatch: The coordinator lacks a setting that this version has, or the other
                way round.
        """
        answer = self.ask("GET", "/v1/info")
        answer["settings"] = self._made(DiLoCoSettings, answer["settings"])
        return self._made(RunInfo, answer)

    def register(self, registration: Mapping[str, Any]) -> None:
        """Register this group under its id, with its model, ranks and address."""
        self.ask("POST", "/v1/replicas", registration)

    def heartbeat(self, replica_id: str, progress: Mapping[str, Any]) -> None:
        """Report a group's progress."""
        self.ask("POST", f"/v1/replicas/{replica_id}/heartbeat", progress)

    def leave(self, replica_id: str, session: str) -> None:
        """End a group's registration."""
        self.ask("DELETE", f"/v1/replicas/{replica_id}?session={session}")

    # ---- work units ---------------------------------------------------------------------------

    def create_dataset(self, dataset: DatasetSpec) -> None:
        """Create a dataset; the same one may be created again.

        Raises:
            NameTakenError: Its name belongs to another dataset.
        """
        self.ask("POST", "/v1/datasets", dataclasses.asdict(dataset))

    def progress(self, dataset_id: str) -> list[dict[str, Any]]:
        """The epochs that have begun: length, done, leased, available."""
        return self.ask("GET", f"/v1/datasets/{quote(dataset_id)}")["epochs"]

    def open_stream(self, name: str, dataset_id: str, replica_id: str, session: str) -> int:
        """Open a stream for a group to read; the same name is always the same stream."""
        body = {
            "name": name,
            "dataset_id": dataset_id,
            "replica_id": replica_id,
            "session": session,
        }
        return self.ask("POST", "/v1/streams", body)["stream"]

    def lease(self, stream: int, number: int, epoch: int) -> Lease:
        """The lease of a number in a stream, from ``epoch`` or an earlier one."""
        body = {"number": number, "epoch": epoch}
        return Lease(**self.ask("POST", f"/v1/streams/{stream}/leases", body))

    def reopen_stream(self, stream: int, position: int, session: str) -> None:
        """Continue a stream from a checkpoint. Refused if its samples belong to others by now."""
        body = {"position": position, "session": session}
        self.ask("POST", f"/v1/streams/{stream}/reopen", body)

    def release_stream(self, stream: int, ledger: Sequence[Sequence[int]]) -> None:
        """End a stream: samples of it that are not in the ledger become available to others."""
        self.ask("POST", f"/v1/streams/{stream}/release", {"ledger": ledger})

    def commit(self, report: CommitReport) -> list[int]:
        """Report which samples are in the model. May be repeated, and may arrive late.

        Returns:
            Streams in the ledger of which the coordinator has lost leases.
        """

        def send() -> list[int]:
            # Every attempt computes the age again. A sync that looks younger than it is could look
            # later than the death of a group that took part in it.
            body = dataclasses.asdict(report)
            body["age_s"] = time.monotonic() - body.pop("ended_at")
            return self.once("POST", "/v1/commits", body)["unknown"]

        return self.retry(send)

    def rewind(self, outer_step: int, ledger: Sequence[Sequence[int]]) -> None:
        """Report that the run continues from a checkpoint's model."""
        self.ask("POST", "/v1/rewind", {"outer_step": outer_step, "ledger": ledger})

    def _made(self, kind: type[Any], values: Mapping[str, Any]) -> Any:
        known = {field.name for field in dataclasses.fields(kind)}
        odd = sorted(known ^ values.keys())
        if odd:
            lacks = [name for name in odd if name in known]
            what = f"lacks {', '.join(lacks)}" if lacks else f"has {', '.join(odd)}, unknown here"
            raise SettingsMismatch(
                f"the coordinator at {self.address} {what}: run the same version of "
                "composer-replication there and here"
            )
        return kind(**values)


def _described(response: httpx.Response) -> str:
    kind = response.headers.get("content-type", "no content type")
    return (
        f"{response.status_code} {response.reason_phrase} ({kind}) is not its answer. Is there a "
        "proxy, another service or another version at this address?"
    )
