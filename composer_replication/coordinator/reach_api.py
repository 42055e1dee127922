"""The HTTP interface of ``doctor``: can this machine reach the caller, and how fast is the link?"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Collection, Iterator
from ipaddress import ip_address
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from composer_replication.coordinator.admission import address_of
from composer_replication.coordinator.api_types import Name, StrictBody
from composer_replication.coordinator.audit import Audit
from composer_replication.coordinator.run_settings import RejectedError

CONNECT_TIMEOUT_S = 3.0
"""Limit of the connection to the caller, and of the wait for its proof, in seconds."""
AT_ONCE = 2
"""Connections to callers at a time. Each blocks one of the threads that answer requests."""
LARGEST = 2**24
"""Bytes that are sent to a caller at most."""
CHUNK = 2**16
"""Bytes that are made and sent at a time."""


class Clock(BaseModel):
    """The time of this machine, in seconds since 1970, and where the caller's request came from."""

    time: float
    address: str | None


class ReachRequest(StrictBody):
    """Where the caller listens, and the bytes with which it answers a connection.

    The ports below 1024 belong to services that no replica group runs.
    """

    host: Name
    port: Annotated[int, Field(ge=1024, lt=2**16)]
    proof: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Reached(BaseModel):
    """Why this machine cannot reach the caller; empty if it can."""

    problem: str


class Received(BaseModel):
    """The answer to a measured upload: how many bytes of its body have arrived."""

    bytes: int


def reach_router(tokens: Collection[str], audit: Audit) -> APIRouter:
    """Build the routes below ``/v1/reach``.

    Args:
        tokens: Accepted tokens of the run. Without one nobody is connected to.
        audit: Receives every request for a connection.
    """
    router = APIRouter(prefix="/reach")
    turns = threading.BoundedSemaphore(AT_ONCE)

    @router.get("")
    async def clock(request: Request) -> Clock:
        """Return this machine's time and the caller's address, which show clock skew and NAT."""
        return Clock(time=time.time(), address=address_of(request.scope))

    @router.post("")
    def reach(request: Request, asked: ReachRequest) -> Reached:
        """Connect to the caller, and to nobody else, under the name that it advertises."""
        caller = address_of(request.scope)
        with audit.action("reach", None, caller, host=asked.host, port=asked.port):
            if not tokens:
                raise RejectedError("this run has no token, so its coordinator connects to nobody")
            if not turns.acquire(blocking=False):
                raise RejectedError("other machines are being checked: try again in some seconds")
            try:
                return Reached(problem=_why_unreached(asked, caller or ""))
            finally:
                turns.release()

    @router.post("/bytes")
    async def receive(request: Request) -> Received:
        """Read a body of any bytes and forget it, so that the caller can measure the link."""
        size = 0
        async for part in request.stream():
            size += len(part)
        return Received(bytes=size)

    @router.get("/bytes", response_class=StreamingResponse)
    def send(size: Annotated[int, Field(ge=1, le=LARGEST)]) -> StreamingResponse:
        """Send random bytes, so that the caller can measure the link in this direction."""
        headers = {"Content-Length": str(size)}
        return StreamingResponse(_bytes(size), 200, headers, "application/octet-stream")

    return router


def _bytes(size: int) -> Iterator[bytes]:
    chunk = os.urandom(CHUNK)  # a link that compresses would look faster than it is
    for start in range(0, size, CHUNK):
        yield chunk[: size - start]


def _why_unreached(asked: ReachRequest, caller: str) -> str:
    """Connect to the caller, and return why that fails; empty if it does not.

    The name is resolved here, as the other groups will. Only the caller's own address is connected
    to, whatever else the name leads to: otherwise everybody with the token could look through this
    machine at hosts that only it reaches.
    """
    own = _plain(caller)
    if own is None:
        raise RejectedError(f"the request comes from {caller!r}, which is no address")
    try:
        found = socket.getaddrinfo(asked.host.strip("[]"), asked.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"{asked.host} does not resolve at the coordinator ({error})"
    addresses = sorted({str(info[4][0]) for info in found})
    if own not in map(_plain, addresses):
        return f"{asked.host} is {', '.join(addresses)} at the coordinator, and you are {own}"
    try:
        with socket.create_connection((own, asked.port), CONNECT_TIMEOUT_S) as connection:
            proof = _read(connection, len(asked.proof))
    except OSError as error:
        return f"no connection from the coordinator to {own} port {asked.port} ({error})"
    return "" if proof == asked.proof.encode() else f"another program answers at {own}"


def _plain(address: str) -> str | None:
    """An address without its scope, and IPv4 in its own form; None if it is no address."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def _read(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes, or fewer if the connection ends or ``CONNECT_TIMEOUT_S`` is over."""
    deadline, read = time.monotonic() + CONNECT_TIMEOUT_S, b""
    while len(read) < size and time.monotonic() < deadline:
        part = connection.recv(size - len(read))
        if not part:
            break
        read += part
    return read
