"""What a donor offers to joiners, and how long both sides wait."""

from __future__ import annotations

from typing import Any, NamedTuple

from composer_replication.replica.messages import converted

SLOWEST_BYTES_PER_S = 1_000_000
"""The slowest download for which a time limit leaves room."""

SLOWEST_COPY_BYTES_PER_S = 100_000_000
"""The slowest copy and hash of a donor's state for which a time limit leaves room."""

MOST_BYTES = 1 << 50
"""Above this a size is none: a state of 100 trillion parameters is smaller."""


def answer_limit_s(timeout: float, num_bytes: int) -> float:
    """How long an answer may take if the donor first has to copy and hash so many bytes."""
    return timeout + num_bytes / SLOWEST_COPY_BYTES_PER_S


def download_limit_s(timeout: float, num_bytes: int) -> float:
    """How long a download may take from the request to the last of so many bytes."""
    return timeout + num_bytes / SLOWEST_BYTES_PER_S


class Part(NamedTuple):
    """A part of a donor's state.

    Attributes:
        name: Its SHA-256, by ``state_bytes.digest``.
        num_bytes: Its size.
    """

    name: str
    num_bytes: int


class Offer(NamedTuple):
    """What a donor has.

    Attributes:
        step: The manager's step.
        num_bytes: About how large the state is, for time limits.
        is_syncing: Whether the donor is between a quorum and its vote, so that its state changes
            before the next quorum.
        state: The global state, if it can be fetched.
        rest: What others have registered with the manager, and torchft's own; in a quorum only.
    """

    step: int
    num_bytes: int = 0
    is_syncing: bool = False
    state: Part | None = None
    rest: Part | None = None

    @classmethod
    def read(cls, answer: Any) -> Offer:
        """Read an offer from the answer of a peer.

        Raises:
            ValueError: It is something else.
        """
        try:
            offer = converted(answer, cls)
            sizes = [part.num_bytes for part in (offer.state, offer.rest) if part is not None]
            if not all(0 <= size < MOST_BYTES for size in (offer.num_bytes, *sizes)):
                raise ValueError("a size is impossible")
            return offer
        except (ValueError, TypeError) as error:
            raise ValueError(f"{answer!r:.200} is no offer of a state: {error}") from error
