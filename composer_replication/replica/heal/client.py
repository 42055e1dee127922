"""The joiner's side of a heal: asks a peer for its state, and checks all that the peer sends."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from composer_replication.replica.heal import state_bytes
from composer_replication.replica.heal.protocol import (
    CHALLENGE,
    CLIENT_NAME,
    MAC,
    NONCE,
    Limits,
    Offer,
    Part,
    Question,
)

CHUNK = 1 << 20
ASK_AGAIN_AFTER_S = 0.02
LARGEST_OFFER = 1 << 16
"""Most bytes that are read of an answer that has not been authenticated yet."""


class HealError(ConnectionError):
    """A peer could not send its global state, or what it sent is not to be trusted.

    A stranger may have written the address in the message, which is one line of the log.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def load(body: memoryview) -> Any:
    """Read the bytes that a peer's ``state_bytes.dump`` made.

    Raises:
        HealError: They are something else.
    """
    try:
        return state_bytes.load(body)
    except state_bytes.NotAState as error:
        raise HealError(
            f"a peer's state is rejected, it is more than tensors and plain containers: {error}"
        ) from error


@dataclass(frozen=True)
class HealClient:
    """Asks the heal servers of peers, and proves in each request that it knows the run's token.

    Args:
        tokens: The run's accepted tokens; the first one signs.
        name: The name of this replica group, for the log of the peers.
        timeout: How long a peer may be silent, in seconds.
    """

    tokens: Sequence[str] = field(repr=False)
    name: str
    timeout: float

    @property
    def limits(self) -> Limits:
        """The time limits of answers and downloads, by the bytes that a peer has to handle."""
        return Limits(self.timeout)

    def ask(self, address: str, path: str, deadline: float) -> Offer:
        """Ask a peer what it has, and check that the peer belongs to this run.

        Args:
            address: The address of its heal server, ``http://host:port``.
            path: ``/latest``, ``/latest/offer`` or ``/offer/STEP``.
            deadline: When the answer must have arrived, by ``time.monotonic``.

        Raises:
            HealError: The peer does not answer, rejects the request, or is not to be trusted.
        """
        # A donor is silent while it copies and hashes its state.
        silence_s = max(self.timeout, _left(deadline))
        with self._answer(address, path, deadline, silence_s) as (question, answer):
            size = int(answer.getheader("Content-Length", ""))
            if size > LARGEST_OFFER:
                raise HealError(f"{address} answers {size} bytes to {path}: rejected")
            body = bytes(_read(answer, state_bytes.memory(size), address, deadline)[:size])
            if not question.is_answered(self.tokens, body, answer.getheader(MAC) or ""):
                raise _stranger(address)
            return Offer.from_json(body)

    def fetch(
        self, address: str, part: Part, deadline: float, into: memoryview | None = None
    ) -> memoryview:
        """Fetch a part of the state that an authenticated answer named.

        Args:
            address: The address of the peer's heal server.
            part: Its name and size.
            deadline: When it must have arrived, by ``time.monotonic``.
            into: Memory to write to, if it has the size of the part. None: fresh memory, which
                is expensive for a large state.

        Returns:
            The bytes of the part, whose hash is its name.

        Raises:
            HealError: The part does not arrive in time, or has another hash.
        """
        path = f"/state/{part.name}"
        with self._answer(address, path, deadline, self.timeout) as (_, answer):
            size = int(answer.getheader("Content-Length", ""))
            if size != part.num_bytes:
                raise HealError(f"{address} sends {size} bytes, and offered {part.num_bytes}")
            body = into if into is not None and len(into) == size else state_bytes.memory(size)
            _read(answer, body, address, deadline)
        if state_bytes.digest([body]) != part.name:
            raise HealError(f"{address} sent a state that is damaged: {size} bytes")
        return body

    @contextlib.contextmanager
    def _answer(
        self, address: str, path: str, deadline: float, silence_s: float
    ) -> Iterator[tuple[Question, HTTPResponse]]:
        """Send a request, and give its proof's content and the answer to the ``with`` block.

        A server that strangers keep full closes connections, those of peers too. Then it is asked
        again, until the deadline.

        Raises:
            HealError: Something went wrong here, or in the ``with`` block.
        """
        try:
            with contextlib.ExitStack() as opened:
                while True:
                    attempt = self._attempt(address, path, deadline, silence_s)
                    try:
                        question, answer = opened.enter_context(attempt)
                        break
                    except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
                        if time.monotonic() > deadline - ASK_AGAIN_AFTER_S:
                            raise
                    time.sleep(ASK_AGAIN_AFTER_S)
                yield question, answer
        except HealError:
            raise
        except (OSError, ValueError, OverflowError, HTTPException) as error:
            if time.monotonic() >= deadline:
                raise HealError(f"{address}{path} did not answer in time") from error
            raise HealError(f"{address}{path}: {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _attempt(
        self, address: str, path: str, deadline: float, silence_s: float
    ) -> Iterator[tuple[Question, HTTPResponse]]:
        with _connected(address, self.timeout, deadline) as connection:
            # A socket's timeout limits each wait, not their sum: a peer that sends a byte now and
            # then could hold this group for ever. The timer ends every wait at once.
            watchdog = threading.Timer(_left(deadline), _break_off, (connection.sock,))
            watchdog.daemon = True
            watchdog.start()
            connection.sock.settimeout(silence_s)
            try:
                with self._exchange(connection, address, path) as (question, answer):
                    yield question, answer
            finally:
                watchdog.cancel()

    @contextlib.contextmanager
    def _exchange(
        self, connection: HTTPConnection, address: str, path: str
    ) -> Iterator[tuple[Question, HTTPResponse]]:
        """Get the server's challenge, then ask with a proof, both on one connection."""
        connection.request("GET", path)
        with connection.getresponse() as answer:  # it may outlive the connection
            challenge = answer.getheader(CHALLENGE)
            if answer.status != 401 or challenge is None or answer.length:
                raise _stranger(address)
            answer.read()
        question = Question(address, path, self.name, challenge, secrets.token_hex(16))
        proof = question.proof(self.tokens[0])
        connection.request(
            "GET", path, headers={NONCE: question.nonce, MAC: proof, CLIENT_NAME: self.name}
        )
        with connection.getresponse() as answer:
            if answer.status == 403:
                raise HealError(
                    f"{address} answers 403 {answer.reason} to {path}: it does not accept this "
                    "group's token. Set COMPOSER_REPLICATION_TOKEN to the same secret in all groups"
                )
            if answer.status != 200:
                raise HealError(f"{address} answers {answer.status} {answer.reason} to {path}")
            yield question, answer


def _stranger(address: str) -> HealError:
    return HealError(
        f"{address} sent a state that is rejected: it does not know this run's token. Either "
        "COMPOSER_REPLICATION_TOKEN differs between the groups, or a stranger has joined"
    )


@contextlib.contextmanager
def _connected(address: str, timeout: float, deadline: float) -> Iterator[HTTPConnection]:
    """Connect to ``http://host:port``.

    Args:
        address: The server's.
        timeout: Limit of each single wait, in seconds.
        deadline: Limit of connecting, by ``time.monotonic``.
    """
    parts = urlsplit(address)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    connection.auto_open = 0  # a challenge is valid on its connection only
    connection.sock = _connect(parts.hostname or "", parts.port or 80, timeout, deadline)
    try:
        yield connection
    finally:
        connection.close()


def _connect(host: str, port: int, timeout: float, deadline: float) -> socket.socket:
    """Connect to the first of a name's addresses that answers.

    ``socket.create_connection`` does the same, but its limit is for each address, not for all.
    """
    reason = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(min(timeout, _left(deadline)))
            connection.connect(address)
            connection.settimeout(timeout)
            return connection
        except OSError as error:
            connection.close()
            reason = error
    raise reason


def _read(answer: HTTPResponse, body: memoryview, address: str, deadline: float) -> memoryview:
    """Fill ``body`` from an answer; raises a HealError if it breaks off or takes too long."""
    received = 0
    while received < len(body):
        num_bytes, reason = 0, "it was closed"
        try:
            num_bytes = answer.readinto(body[received : received + CHUNK])
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise HealError(
                f"the global state from {address} did not arrive in time: "
                f"{received} of {len(body)} bytes"
            )
        if not num_bytes:
            raise HealError(
                f"the connection to {address} broke off after {received} of {len(body)} bytes: "
                f"{reason}"
            )
        received += num_bytes
    return body


def _left(deadline: float) -> float:
    """Seconds until the deadline, but never 0: a socket with timeout 0 does not wait at all."""
    return max(0.001, deadline - time.monotonic())


def _break_off(connection: socket.socket) -> None:
    """End every wait on a connection, in whichever thread it is."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
