"""Asking a peer for its state, and trusting nothing that it sends."""

from __future__ import annotations

import hashlib
import hmac
import io
import secrets
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import torch

SLOWEST_BYTES_PER_S = 1_000_000
"""What the time limit of a download ahead of the quorum allows for."""

CHUNK = 1 << 20
NONCE, MAC = "X-Nonce", "X-Mac"


class HealError(ConnectionError):
    """A peer's global state could not be had, or is not to be trusted."""


def dump(content: Any) -> bytes:
    """Tensors and plain containers as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def load(body: bytes) -> Any:
    """What ``dump`` made, and nothing that could run code."""
    try:
        return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own text is a page of advice; its cause is one line
        reason = str(error.__cause__ or error).splitlines()[0]
        raise HealError(
            f"a peer's state is refused, it is more than tensors and plain containers: {reason}"
        ) from error


def sign(token: str, nonce: str, content: bytes) -> str:
    """HMAC-SHA256, in hex."""
    return hmac.new(token.encode(), nonce.encode() + b"\0" + content, hashlib.sha256).hexdigest()


def fetch(address: str, path: str, token: str, timeout: float, deadline: float) -> bytes:
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


def fetch_state(address: str, name: str, token: str, timeout: float, deadline: float) -> bytes:
    """Fetch a state by its name, which an authenticated answer has told.

    Raises:
        HealError: It does not come in time, or is another.
    """
    body, _ = _get(address, f"/state/{name}", token, secrets.token_hex(16), timeout, deadline)
    if hashlib.sha256(body).hexdigest() != name:
        raise HealError(f"{address} sent a state that is damaged: {len(body)} bytes")
    return body


def _get(
    address: str, path: str, token: str, nonce: str, timeout: float, deadline: float
) -> tuple[bytes, str]:
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        proof = sign(token, nonce, path.encode())
        connection.request("GET", path, headers={NONCE: nonce, MAC: proof})
        answer = connection.getresponse()
        if answer.status != 200:
            raise HealError(f"{address} answers {answer.status} {answer.reason} to {path}")
        chunks = []
        while chunk := answer.read1(CHUNK):
            chunks.append(chunk)
            if time.monotonic() > deadline:
                raise HealError(
                    f"the global state from {address} did not arrive in time: "
                    f"{sum(map(len, chunks))} of {answer.getheader('Content-Length')} bytes"
                )
        body = b"".join(chunks)
        if len(body) != int(answer.getheader("Content-Length") or -1):
            raise HealError(f"the connection to {address} broke off after {len(body)} bytes")
        return body, answer.getheader(MAC) or ""
    except OSError as error:
        if isinstance(error, HealError):
            raise
        raise HealError(f"{address}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
