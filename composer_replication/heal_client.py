"""Asking a peer for its state, and trusting nothing that it sends."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from composer_replication import heal_format

SLOWEST_BYTES_PER_S = 1_000_000
"""What the time limit of a download ahead of the quorum allows for."""

CHUNK = 1 << 20
NONCE, MAC = "X-Nonce", "X-Mac"


class HealError(ConnectionError):
    """A peer's global state could not be had, or is not to be trusted."""


def load(body: memoryview) -> Any:
    """What a peer's ``heal_format.dump`` made.

    Raises:
        HealError: It is something else.
    """
    try:
        return heal_format.load(body)
    except heal_format.NotAState as error:
        raise HealError(
            f"a peer's state is refused, it is more than tensors and plain containers: {error}"
        ) from error


def sign(token: str, nonce: str, content: bytes | memoryview) -> str:
    """HMAC-SHA256, in hex."""
    signature = hmac.new(token.encode(), nonce.encode() + b"\0", hashlib.sha256)
    signature.update(content)
    return signature.hexdigest()


def fetch(address: str, path: str, token: str, timeout: float, deadline: float) -> memoryview:
    """Ask a peer's heal server for something small, and check that it is a peer of this run.

    Raises:
        HealError: It does not answer, refuses, or is not to be trusted.
    """
    nonce = secrets.token_hex(16)
    body, mac = _get(address, path, token, nonce, timeout, deadline)
    if not hmac.compare_digest(mac, sign(token, nonce, body)):
        raise HealError(
            f"{address} sent a state that is refused: it does not know this run's token. Either "
            "COMPOSER_REPLICATION_TOKEN differs between the groups, or a stranger has joined"
        )
    return body


def fetch_state(
    address: str,
    name: str,
    token: str,
    timeout: float,
    deadline: float,
    into: memoryview | None = None,
) -> memoryview:
    """Fetch a state by its name, which an authenticated answer has told.

    Args:
        address: Of the peer's heal server.
        name: The state's digest.
        token: The run's.
        timeout: How long the peer may be silent, in seconds.
        deadline: When the state has to be here, by ``time.monotonic``.
        into: Memory that is needed no longer, for a state of the same size.

    Raises:
        HealError: It does not come in time, or is another.
    """
    nonce = secrets.token_hex(16)
    body, _ = _get(address, f"/state/{name}", token, nonce, timeout, deadline, into)
    if heal_format.digest([body]) != name:
        raise HealError(f"{address} sent a state that is damaged: {len(body)} bytes")
    return body


def _get(
    address: str,
    path: str,
    token: str,
    nonce: str,
    timeout: float,
    deadline: float,
    into: memoryview | None = None,
) -> tuple[memoryview, str]:
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        proof = sign(token, nonce, path.encode())
        connection.request("GET", path, headers={NONCE: nonce, MAC: proof})
        answer = connection.getresponse()
        if answer.status != 200:
            raise HealError(f"{address} answers {answer.status} {answer.reason} to {path}")
        size, received = int(answer.getheader("Content-Length", "")), 0
        body = into if into is not None and len(into) == size else heal_format.memory(size)
        while received < len(body):
            if time.monotonic() > deadline:
                raise HealError(
                    f"the global state from {address} did not arrive in time: "
                    f"{received} of {len(body)} bytes"
                )
            num_bytes = answer.readinto(body[received : received + CHUNK])
            if not num_bytes:
                raise HealError(f"the connection to {address} broke off after {received} bytes")
            received += num_bytes
        return body, answer.getheader(MAC) or ""
    except HealError:
        raise
    except (OSError, ValueError, OverflowError, HTTPException) as error:
        raise HealError(f"{address}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
