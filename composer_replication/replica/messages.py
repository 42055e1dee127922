"""Messages between groups: the proof of the run's token, and JSON over a connection.

One proof serves the reports in a quorum (``quorum``) and the requests to a rank's server
(``peer_server``).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import socket
import struct
import time
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

CHUNK = 1 << 20
"""Most bytes that are received at a time, between two looks at the clock."""

_LENGTH = struct.Struct("<I")


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
    connection.settimeout(
        max(0.001, deadline - time.monotonic())
    )  # a timeout of 0 would make the socket non-blocking
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
    connection: socket.socket, body: memoryview, deadline: float, silence_s: float = math.inf
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
            reason = f"it did not arrive in time: {received} of {len(body)} bytes"
            raise TimeoutError(reason) from None
        if not count:
            reason = f"the connection was closed after {received} of {len(body)} bytes"
            raise ConnectionResetError(reason)
        received += count
