"""How both sides of a heal prove the run's token, so that a stranger in between gains nothing."""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass

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
        for part in (*(field.encode() for field in fields), *parts):
            mac.update(struct.pack("<Q", len(part)))
            mac.update(part)
        return mac.hexdigest()


def _equal(expected: str, received: str) -> bool:
    # As bytes: compare_digest raises a TypeError for a str that is not ASCII.
    return hmac.compare_digest(expected.encode(), received.encode())
