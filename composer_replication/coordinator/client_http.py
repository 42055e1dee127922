"""HTTP requests to the coordinator: what counts as its answer, and how often a request is sent."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Self, TypeVar

import httpx
import tenacity

from composer_replication.replica.options import DuplicateIdError

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Fields = Mapping[str, type]
"""The fields that an answer must have, with their types."""

_NONE: Fields = MappingProxyType({})


class CoordinatorAwayError(ConnectionError):
    """The coordinator does not answer, or something else answers at its address."""


class RejectedByCoordinatorError(ValueError):
    """The coordinator rejects a request; the message says why."""


class NameTakenError(RejectedByCoordinatorError, DuplicateIdError):
    """A living replica group, or another dataset, has the name."""


class CoordinatorHttp:
    """A connection to the coordinator. Several threads may use it.

    Args:
        address: ``http://host:port`` or ``https://host:port``. The certificate of an ``https``
            server is checked against the authorities that httpx knows, or those in the file
            ``SSL_CERT_FILE``.
        token: The run's secret, if it has one.
        retry_s: How long a request that nobody answers is repeated, in seconds. 0: it is sent
            once. ``math.inf``: until ``close``.

    Raises:
        ValueError: The address is no URL.
    """

    TIMEOUT_S = 5.0
    LOG_AT = (4, 20)
    """The attempts at which a wait is logged; after these every hundredth."""

    def __init__(self, address: str, token: str | None, retry_s: float = 5.0) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError(
                f"coordinator_addr={address!r}: write http://{address}, in the argument or in "
                "COMPOSER_REPLICATION_COORDINATOR"
            )
        self.address = address
        self._retry_s, self._timeout_s = retry_s, self.TIMEOUT_S
        self._closed = threading.Event()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # The transport reads SSL_CERT_FILE. The client's trust_env would also read proxies from the
        # environment: groups connect directly.
        self._client = httpx.Client(
            base_url=address, headers=headers, trust_env=False, transport=httpx.HTTPTransport()
        )

    def with_limits(self, retry_s: float, timeout_s: float = TIMEOUT_S) -> Self:
        """The same connection with another ``retry_s``, and another timeout of one request."""
        limited = copy.copy(self)
        limited._retry_s, limited._timeout_s = retry_s, timeout_s
        return limited

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, fields: Fields = _NONE
    ) -> dict[str, Any]:
        """Send a request, and repeat it while nobody answers. Arguments and errors: ``once``."""
        return self.retry(lambda: self.once(method, path, body, fields))

    def retry(
        self, call: Callable[[], Answer], on: type[Exception] = CoordinatorAwayError
    ) -> Answer:
        """Repeat a call while it raises an error, up to ``retry_s``, with a back-off.

        Every wait for the coordinator is in here.
        """
        is_late = tenacity.stop_after_delay(self._retry_s)
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

    def once(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, fields: Fields = _NONE
    ) -> dict[str, Any]:
        """Send a request once.

        A login page, a proxy's error or a redirect does not come from the coordinator. Whatever is
        not its JSON counts as no answer, so that it ends neither a thread nor a group.

        Args:
            method: ``GET``, ``POST`` or ``DELETE``.
            path: From ``/v1`` on, quoted.
            body: Sent as JSON.
            fields: What the answer must contain.

        Returns:
            The answer, a JSON object.

        Raises:
            CoordinatorAwayError: There is no such answer.
            RejectedByCoordinatorError: The coordinator rejects; ``NameTakenError`` for status 409.
        """
        return self._checked(self._send(method, path, json=body), fields)

    def _send(self, method: str, path: str, **body: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, timeout=self._timeout_s, **body)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: another thread closed it
            raise CoordinatorAwayError(
                f"no coordinator answers at {self.address} ({error}). Start one with "
                "`composer-replication coordinator CONFIG`, or correct "
                "COMPOSER_REPLICATION_COORDINATOR (coordinator_addr=...)"
            ) from None

    def _checked(self, response: httpx.Response, fields: Fields) -> dict[str, Any]:
        try:
            answer = response.json()
        except (ValueError, RecursionError):
            answer = None
        detail = answer.get("detail") if isinstance(answer, dict) else None
        if response.is_client_error and detail is not None:
            refusal = NameTakenError if response.status_code == 409 else RejectedByCoordinatorError
            raise refusal(f"the coordinator at {self.address} rejects: {detail}")
        if response.is_success and isinstance(answer, dict) and _has_fields(answer, fields):
            return answer
        raise CoordinatorAwayError(
            f"the coordinator at {self.address} cannot serve: {detail or _described(response)}"
        )

    def close(self) -> None:
        """Close the connection, and end every wait for the coordinator in other threads."""
        self._closed.set()
        self._client.close()


def _has_fields(answer: Mapping[str, Any], fields: Fields) -> bool:
    # JSON has one kind of number: 3 is a float too.
    return all(
        isinstance(answer.get(name), (int, float) if kind is float else kind)
        for name, kind in fields.items()
    )


def _described(response: httpx.Response) -> str:
    kind = response.headers.get("content-type", "no content type")
    return (
        f"{response.status_code} {response.reason_phrase} ({kind}) is not its answer. Is there a "
        "proxy, or another service, at this address?"
    )
