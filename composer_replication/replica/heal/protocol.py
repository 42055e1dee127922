"""What both sides of a heal say: the offer of a state, and the proofs of the run's token.

With the proofs a stranger in between gains nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

SLOWEST_BYTES_PER_S = 1_000_000
"""The slowest download for which a time limit leaves room."""

SLOWEST_COPY_BYTES_PER_S = 100_000_000
"""The slowest copy and hash of a donor's state for which a time limit leaves room."""

MOST_BYTES = 1 << 50
"""Above this a size is none: a state of 100 trillion parameters is smaller."""


@dataclass(frozen=True)
class Limits:
    """How long to wait for a peer, in seconds, by the bytes that it has to handle.

    Attributes:
        timeout: How long a peer may be silent, in seconds.
    """

    timeout: float

    def of_answer(self, num_bytes: int) -> float:
        """How long an answer may take if the donor first has to copy and hash so many bytes."""
        return self.timeout + num_bytes / SLOWEST_COPY_BYTES_PER_S

    def of_download(self, num_bytes: int) -> float:
        """How long a download may take from the request to the last of so many bytes."""
        return self.timeout + num_bytes / SLOWEST_BYTES_PER_S


@dataclass(frozen=True)
class Part:
    """A part of a donor's state.

    Attributes:
        name: Its SHA-256, by ``state_bytes.digest``.
        num_bytes: Its size.
    """

    name: str
    num_bytes: int

    def __post_init__(self) -> None:
        is_part = isinstance(self.name, str) and isinstance(self.num_bytes, int)
        if not is_part or not 0 <= self.num_bytes < MOST_BYTES:
            raise ValueError(f"{self!r} is no part of a state")


@dataclass(frozen=True)
class Offer:
    """What a donor has.

    Attributes:
        step: The manager's step.
        num_bytes: About how large the state is, for time limits.
        parts: The parts of the state that can be fetched: ``state`` is the global state, ``rest``
            what others have registered with the manager and torchft's own.
        is_syncing: Whether the donor is between a quorum and its vote, so that its state changes
            before the next quorum.
    """

    step: int
    num_bytes: int = 0
    parts: Mapping[str, Part] = field(default_factory=dict)
    is_syncing: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Offer:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: The text is something else.
        """
        try:
            content = json.loads(text)
            parts = {kind: Part(**part) for kind, part in content["parts"].items()}
            num_bytes = int(content["num_bytes"])
            if not 0 <= num_bytes < MOST_BYTES:
                raise ValueError(f"{num_bytes=}")
            is_syncing = bool(content.get("is_syncing", False))  # older versions do not say it
            return cls(int(content["step"]), num_bytes, parts, is_syncing)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is no offer of a state: {error!r}") from error


CHALLENGE, NONCE, MAC, CLIENT_NAME = "X-Challenge", "X-Nonce", "X-Mac", "X-Replica-Group"
"""HTTP headers: the server's nonce, the client's, the proof, and the name of the client's group."""


@dataclass(frozen=True)
class Question:
    """A request to a heal server, with everything that makes it different from other requests.

    Both proofs are HMACs of all these fields, with the run's token as the key.

    Args:
        address: The server's address, as the client dialled it. A server rejects a proof that was
            made for another address, so a stranger cannot relay the request.
        path: The path of the request.
        client_name: The name of the client's replica group.
        challenge: A random number from the server. It is valid once and on this connection, so a
            recorded request is worth nothing.
        nonce: A random number from the client, so that a recorded answer is worth nothing.
    """

    address: str
    path: str
    client_name: str
    challenge: str
    nonce: str

    def proof(self, token: str) -> str:
        """The client's proof that it knows the token."""
        return self._mac(token, b"question")

    def proof_of_answer(self, token: str, body: bytes) -> str:
        """The server's proof that it knows the token, and that this is its answer."""
        return self._mac(token, b"answer", body)

    def is_proven(self, tokens: Sequence[str], mac: str) -> bool:
        """Whether the client knows one of the accepted tokens."""
        return any(_equal(self.proof(token), mac) for token in tokens)

    def is_answered(self, tokens: Sequence[str], body: bytes, mac: str) -> bool:
        """Whether the server knows one of the accepted tokens and has sent this body."""
        return any(_equal(self.proof_of_answer(token, body), mac) for token in tokens)

    def _mac(self, token: str, *parts: bytes) -> str:
        """HMAC-SHA256, in hex. Each part follows its length: none can run into the next."""
        mac = hmac.new(token.encode(), digestmod=hashlib.sha256)
        fields = (self.address, self.path, self.client_name, self.challenge, self.nonce)
        for part in (*(each.encode() for each in fields), *parts):
            mac.update(struct.pack("<Q", len(part)))
            mac.update(part)
        return mac.hexdigest()


def _equal(expected: str, received: str) -> bool:
    # As bytes: compare_digest raises a TypeError for a str that is not ASCII.
    return hmac.compare_digest(expected.encode(), received.encode())
