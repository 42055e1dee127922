"""What both sides of a heal sign, so that neither needs to believe what a stranger passes on."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

CHALLENGE, NONCE, MAC, ASKER = "X-Challenge", "X-Nonce", "X-Mac", "X-Replica-Group"
"""HTTP headers: the server's nonce, the client's, the proof, and the name of the client's group."""


@dataclass(frozen=True)
class Question:
    """A request to a heal server, with all that tells it from every other request.

    Args:
        address: Whom it is for, as the client dialled: a server refuses a proof that was made for
            another, so nobody can pass it on.
        path: What is asked for.
        asker: Name of the client's replica group.
        challenge: A random number from the server, valid once and on this connection, so that a
            recorded request is worth nothing.
        nonce: One from the client, so that a recorded answer is worth nothing.
    """

    address: str
    path: str
    asker: str
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
        fields = (self.address, self.path, self.asker, self.challenge, self.nonce)
        for part in (*(field.encode() for field in fields), *parts):
            mac.update(struct.pack("<Q", len(part)))
            mac.update(part)
        return mac.hexdigest()


def _equal(expected: str, found: str) -> bool:
    # As bytes: compare_digest raises a TypeError for a str that is not ASCII.
    return hmac.compare_digest(expected.encode(), found.encode())
