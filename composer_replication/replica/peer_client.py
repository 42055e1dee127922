"""Messages between groups: the proof of the run's token, JSON over a connection, and the client.

One proof serves the reports in a quorum (``quorum``) and the requests to a rank's server
(``peer_server``), which ``PeerClient`` makes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from composer_replication.replica.addresses import host_and_port

CHUNK = 1 << 20
"""Most bytes that are received at a time, between two looks at the clock."""

_LENGTH = struct.Struct("<I")

ASK_AGAIN_AFTER_S = 0.02
LARGEST_ANSWER = 1 << 16
"""Most bytes that are read of an answer that has not been authenticated yet."""


def proof(token: str, *content: Any) -> str:
    """Return the proof that its author knows a token and has sent this content, as JSON.

    Args:
        token: The run's secret.
        content: The message, and everything that makes it different from other occasions. Its first
            part is the kind of message, so that a proof of one kind is invalid for another.
    """
    # JSON keeps the parts apart: ("ab", "c") and ("a", "bc") have different proofs.
    text = json.dumps(content, sort_keys=True)
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proven(tokens: Sequence[str], received: Any, *content: Any) -> bool:
    """Whether a received proof shows that its author knows one of the tokens and sent this."""
    # As bytes: compare_digest raises a TypeError for a str that is not ASCII.
    return isinstance(received, str) and any(
        hmac.compare_digest(received.encode(), proof(token, *content).encode()) for token in tokens
    )


def converted(value: Any, kind: Any) -> Any:
    """Convert a value from JSON, which has lists and no tuples, to the type of a field.

    Args:
        value: From JSON.
        kind: A plain type, a NamedTuple, a tuple of any length, or one of these or None.

    Raises:
        TypeError: It is not of that type.
        ValueError: It is a list of another length.
    """
    kinds = get_args(kind)
    if NoneType in kinds:  # or None
        return None if value is None else converted(value, kinds[0])
    if get_origin(kind) is tuple:
        return tuple(converted(each, kinds[0]) for each in converted(value, list))
    if issubclass(kind, tuple):
        pairs = zip(converted(value, list), get_type_hints(kind).values(), strict=True)
        return kind(*(converted(*pair) for pair in pairs))
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def send(connection: socket.socket, content: Any, deadline: float) -> None:
    """Send content that JSON can hold, after its length.

    Args:
        connection: Where to.
        content: The content.
        deadline: When it must have been sent, by ``time.monotonic``.
    """
    text = json.dumps(content).encode()
    # A timeout of 0 would make the socket non-blocking.
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive(connection: socket.socket, most: int, deadline: float) -> Any:
    """Receive what ``send`` has sent.

    Args:
        connection: Where from.
        most: Most bytes to read: the other side is not authenticated yet.
        deadline: When it must have arrived, by ``time.monotonic``.

    Raises:
        ConnectionResetError: The connection was closed before.
        OSError: It has not arrived in time.
        ValueError: It is longer, or something else.
    """
    head = bytearray(_LENGTH.size)
    fill(connection, memoryview(head), deadline)
    (size,) = _LENGTH.unpack(head)
    if size > most:
        raise ValueError(f"a message of {size} bytes is rejected: at most {most} are read")
    text = bytearray(size)
    fill(connection, memoryview(text), deadline)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error


def fill(
    connection: socket.socket,
    body: memoryview,
    deadline: float,
    silence_s: float = math.inf,
) -> None:
    """Fill ``body`` with what comes next.

    Args:
        connection: Where from.
        body: The memory.
        deadline: When all of it must have arrived, by ``time.monotonic``.
        silence_s: How long nothing may come before, in seconds.

    Raises:
        ConnectionResetError: The connection was closed before.
        OSError: It has not arrived in time.
    """
    received = 0
    while received < len(body):
        # Set for each wait: a socket's timeout limits one wait only, and a peer that sends a byte
        # now and then could hold this process for ever.
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            connection.settimeout(min(left, silence_s))
            count = connection.recv_into(body[received : received + CHUNK])
        except TimeoutError:
            raise TimeoutError(
                f"it did not arrive in time: {received} of {len(body)} bytes"
            ) from None
        if not count:
            raise ConnectionResetError(
                f"the connection was closed after {received} of {len(body)} bytes"
            )
        received += count


class PeerError(ConnectionError):
    """A peer could not answer, or its answer cannot be trusted.

    The message is made one line: a stranger may have written the address in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NothingThere(PeerError):
    """A peer has no answer to a request, for example because it has left."""


class PeerClient:
    """Asks the servers of peers, and proves in each request that it knows the run's token.

    Args:
        tokens: The run's accepted tokens, at least one; the first one signs.
        name: The name of this replica group, for the log of the peers.
        timeout: How long a peer may be silent, in seconds.
    """

    def __init__(self, tokens: Sequence[str], name: str, timeout: float) -> None:
        self._tokens = tokens
        self._name = name
        self.timeout = timeout
        # The one IP address and port where each address was reached: a look-up of a name takes
        # seconds where no name server answers.
        self._ends: dict[str, list[Any]] = {}

    def ask(self, address: str, *request: str, limit_s: float | None = None) -> Any:
        """Ask a peer for an answer that JSON can hold.

        Args:
            address: The address of its server, ``host:port``.
            *request: The kind of request, and its arguments.
            limit_s: How long it may take, in seconds. None: ``timeout``.

        Raises:
            PeerError: The peer does not answer, rejects the request, or cannot be trusted.
        """
        deadline = time.monotonic() + (self.timeout if limit_s is None else limit_s)
        # No limit of silence: a donor is silent while it copies and hashes its state.
        with self._asked(address, request, deadline, math.inf) as (_, answer):
            return answer

    def fetch(self, address: str, *request: str, deadline: float, into: memoryview) -> None:
        """Receive the body of an answer, which the caller has to check: it has no proof.

        Args:
            address: As for ``ask``.
            *request: As for ``ask``.
            deadline: When all of it must have arrived, by ``time.monotonic``.
            into: The memory to write it into, of the body's size.

        Raises:
            PeerError: The body does not arrive in time, or has another size.
        """
        with self._asked(address, request, deadline, self.timeout) as (connection, size):
            if size != len(into):
                raise PeerError(f"{address} sends {size} bytes, and offered {len(into)}")
            fill(connection, into, deadline, self.timeout)

    @contextlib.contextmanager
    def _asked(
        self,
        address: str,
        request: Sequence[str],
        deadline: float,
        silence_s: float,
    ) -> Iterator[tuple[socket.socket, Any]]:
        """Send a request until it is answered; a block gets the connection and the answer.

        Raises:
            PeerError: Something went wrong here, or in the block.
        """
        with contextlib.ExitStack() as opened:
            try:
                while True:
                    try:
                        connection = opened.enter_context(self._connect(address, deadline))
                        soon = min(deadline, time.monotonic() + silence_s)
                        answer = self._exchange(connection, address, request, soon)
                        break
                    except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
                        # A server that strangers keep full closes connections, those of peers too.
                        if time.monotonic() > deadline - ASK_AGAIN_AFTER_S:
                            raise
                    opened.close()
                    time.sleep(ASK_AGAIN_AFTER_S)
                yield connection, answer
            except PeerError:
                raise
            except (OSError, ValueError) as error:
                what = f"{address}, asked for {' '.join(request)!r:.200}"
                raise PeerError(f"{what}: {type(error).__name__}: {error}") from error

    def _exchange(
        self,
        connection: socket.socket,
        address: str,
        request: Sequence[str],
        deadline: float,
    ) -> Any:
        """Get the server's challenge, ask with a proof for it, and check that of the answer."""
        challenge = receive(connection, LARGEST_ANSWER, deadline)
        nonce = secrets.token_hex(16)
        question = (address, challenge, nonce, self._name, request)
        sent = {
            "nonce": nonce,
            "name": self._name,
            "request": request,
            "proof": proof(self._tokens[0], "question", *question),
        }
        send(connection, sent, deadline)
        said = receive(connection, LARGEST_ANSWER, deadline)
        if not isinstance(said, dict):
            raise ValueError(f"it answers {said!r:.40}")
        error = said.get("error")
        if error == "rejected":
            raise PeerError(
                f"{address} does not accept this group's token: set COMPOSER_REPLICATION_TOKEN to "
                "the same secret in all groups"
            )
        if error == "failed":
            raise PeerError(
                f"{address} could not answer {' '.join(request)!r:.200}: its log has the reason"
            )
        if error is not None:
            raise NothingThere(f"{address} has no {' '.join(request)!r:.200}")
        answer = said.get("answer")
        if not is_proven(self._tokens, said.get("proof"), "answer", *question, answer):
            raise PeerError(
                f"what {address} sent is rejected: it does not know this run's token. Either "
                "COMPOSER_REPLICATION_TOKEN differs between the groups, or a stranger has joined"
            )
        return answer

    def _connect(self, address: str, deadline: float) -> socket.socket:
        """Connect to the first of a name's addresses that answers.

        ``socket.create_connection`` takes a name too, but its limit is for each address, not for
        all.
        """
        host, port = host_and_port(address)
        ends: list[Any] = self._ends.pop(address, None) or [
            end[:2] for *_, end in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
        reason = OSError(f"{host} has no address")
        for end in ends:
            try:
                left = deadline - time.monotonic()
                connection = socket.create_connection(end, max(0.001, min(self.timeout, left)))
                self._ends[address] = [end]
                return connection
            except OSError as error:
                reason = error
        raise reason
