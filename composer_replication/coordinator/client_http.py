"""Requests to the coordinator, and what counts as its answer."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential

from composer_replication.replica.tls import client_context

Fields = Mapping[str, type]
"""The fields that an answer must have, with their types."""

_NONE: Fields = MappingProxyType({})


class CoordinatorAwayError(ConnectionError):
    """The coordinator does not answer, or something else answers at its address."""


class RefusedByCoordinatorError(ValueError):
    """The coordinator refuses a request; the message says why."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class CoordinatorHttp:
    """A connection to the coordinator.

    Args:
        address: ``http://host:port`` or ``https://host:port``.
        token: The run's secret, if it has one.
        patience_s: How long ``ask`` repeats a request that nobody answers, in seconds.
        tls_dir: The folder of certificates with which the two prove to each other that they belong
            to the run. None: an ``https`` server, for example a proxy, needs a certificate of an
            authority that this machine trusts, or of those in ``SSL_CERT_FILE``.

    Raises:
        ValueError: The certificates cannot be used, or there are some and the address is ``http``.
    """

    def __init__(
        self, address: str, token: str | None, patience_s: float, tls_dir: str | None = None
    ) -> None:
        if tls_dir is not None and not address.startswith("https://"):
            raise ValueError(
                f"coordinator_addr={address!r} is no https:// address, and tls_dir={tls_dir!r} is "
                "set: the token would travel unencrypted. Start the coordinator with --tls-dir "
                "and give its https:// address, or leave tls_dir out everywhere"
            )
        self._address = address
        self._patience_s = patience_s
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # trust_env would take proxies from the environment, too: groups talk to it directly.
        self._client = httpx.Client(
            base_url=address,
            headers=headers,
            timeout=5.0,
            trust_env=False,
            verify=_trusted() if tls_dir is None else client_context(tls_dir),
        )

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, fields: Fields = _NONE
    ) -> dict[str, Any]:
        """Send a request, again and again while nobody answers. Arguments and errors: ``once``."""
        retrying = Retrying(
            retry=retry_if_exception_type(CoordinatorAwayError),
            stop=stop_after_delay(self._patience_s),
            wait=wait_exponential(0.1, max=1.0),
            reraise=True,
        )
        return retrying(self.once, method, path, body, fields)

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
            RefusedByCoordinatorError: The coordinator refuses.
        """
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise CoordinatorAwayError(
                f"no coordinator answers at {self._address} ({error}). Start one with "
                "`composer-replication coordinator CONFIG`, or correct "
                "COMPOSER_REPLICATION_COORDINATOR"
            ) from error
        try:
            found = answer.json()
        except (ValueError, RecursionError):
            found = None
        detail = found.get("detail") if isinstance(found, dict) else None
        if answer.is_client_error and detail is not None:
            raise RefusedByCoordinatorError(
                f"the coordinator at {self._address} refuses: {detail}", answer.status_code
            )
        if answer.is_success and isinstance(found, dict) and _has_fields(found, fields):
            return found
        raise CoordinatorAwayError(
            f"the coordinator at {self._address} cannot serve: {detail or _described(answer)}"
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _trusted() -> ssl.SSLContext | bool:
    """Who may have signed the certificate of an https address."""
    # OpenSSL reads this variable; httpx alone would ask certifi's list and nobody else.
    return ssl.create_default_context() if "SSL_CERT_FILE" in os.environ else True


def _has_fields(found: Mapping[str, Any], fields: Fields) -> bool:
    # JSON has one kind of number: 3 is a float too.
    return all(
        isinstance(found.get(name), (int, float) if kind is float else kind)
        for name, kind in fields.items()
    )


def _described(answer: httpx.Response) -> str:
    kind = answer.headers.get("content-type", "no content type")
    return (
        f"{answer.status_code} {answer.reason_phrase} ({kind}) is not its answer. Is there a "
        "proxy, or another service, at this address?"
    )
