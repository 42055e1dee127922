"""The donor's side of a heal: what this rank offers to joiners, and the one copy that it makes."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from composer_replication.diloco.global_state import GlobalState
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.peer_client import PeerError, converted
from composer_replication.replica.peer_server import Body, Served

KEPT_S = 60.0
"""How long a copy of the state is kept for a joiner that has asked for its name, in seconds."""

SLOWEST_BYTES_PER_S = 1_000_000
"""The slowest download for which a time limit leaves room."""

SLOWEST_COPY_BYTES_PER_S = 100_000_000
"""The slowest copy and hash of a donor's state for which a time limit leaves room."""

MOST_BYTES = 1 << 50
"""A larger size is taken for an error: a state of 100 trillion parameters is smaller."""


def answer_limit_s(timeout: float, num_bytes: int) -> float:
    """How long an answer may take, in seconds, if the donor first copies and hashes the state."""
    return timeout + num_bytes / SLOWEST_COPY_BYTES_PER_S


def download_limit_s(timeout: float, num_bytes: int) -> float:
    """How long a download of so many bytes may take from request to end, in seconds."""
    return timeout + num_bytes / SLOWEST_BYTES_PER_S


class Part(NamedTuple):
    """A part of a donor's state.

    Attributes:
        name: The SHA-256 over the SHA-256s of 16 MiB each of its bytes. Equal states have equal
            bytes, whichever group has them (``state_bytes``).
        num_bytes: Its size.
    """

    name: str = ""
    num_bytes: int = 0

    @classmethod
    def of(cls, body: Body) -> Part:
        """What a joiner needs to fetch these bytes: their hash as a name, and their size."""
        return cls(state_bytes.digest_of_bytes(body), sum(map(len, body)))


class Offer(NamedTuple):
    """What a donor has to offer.

    Attributes:
        step: The manager's step.
        num_bytes: About how large the state is, for time limits; of the latest state only.
        is_syncing: Whether the donor is between a quorum and its vote, so that its state changes
            before the next quorum.
        state: The global state; without a name if it has not been copied or named for a joiner.
        rest: What others have registered with the manager, and torchft's own; in a quorum only.
    """

    step: int
    num_bytes: int = 0
    is_syncing: bool = False
    state: Part = Part()
    rest: Part = Part()

    @classmethod
    def read(cls, answer: Any, address: str) -> Offer:
        """Read an offer from the answer of the peer at an address.

        Raises:
            PeerError: It is something else.
        """
        try:
            offer = converted(answer, cls)
            for part in (offer, offer.state, offer.rest):
                if not 0 <= part.num_bytes < MOST_BYTES:
                    raise ValueError("a size is impossible")
            return offer
        except (ValueError, TypeError) as error:
            raise PeerError(
                f"{address}: {answer!r:.200} is no offer of a state: {error}"
            ) from error


@dataclass(eq=False)
class _Copy(Served):
    """A copy of the global state for joiners outside of a quorum.

    Attributes:
        version: The version of the state, see ``GlobalState``.
        offer: The answer to joiners that ask for it: step, name and size.
        made_at: When it was made, by ``time.monotonic``.
    """

    version: Hashable
    offer: Offer
    made_at: float


@dataclass
class _Quorum:
    """What this group offers while it waits in a quorum with a joiner.

    Attributes:
        version: The version of the global state.
        state: The global state: the tensors themselves, which do not change before the vote.
        rest: Name and size of the rest.
        rest_body: The bytes of the rest.
    """

    version: Hashable
    state: Mapping[str, Any]
    rest: Part
    rest_body: Body

    @functools.cached_property
    def body(self) -> Body:
        """The bytes of the global state, without a copy where it lies in host memory."""
        return state_bytes.dump(self.state)


_NOT_NAMED: tuple[Hashable, Part] = object(), Part()


def _no_offer() -> Offer:
    return Offer(0)


class Donor:
    """Answers joiners: with the names of states, at once if they are known, and with their bytes.

    In a quorum, where all groups wait, nothing is copied: the state cannot change before the vote,
    so its own memory is sent. If a joiner has given up and the vote is over, that memory changes
    while it is sent, and does not have the offered hash any more. A name that is known from the
    joiner's download is not computed again.

    Outside of a quorum there is one copy at most. It is made on the thread of the joiner's
    connection, while training goes on, and dropped as soon as nobody wants it. While it is being
    sent, other joiners are offered it too, even if it is of an older step: two copies could be more
    than the memory of this machine.

    Threads: torchft calls ``open`` and ``close`` on the thread of the quorum, and each connection
    of the server has a thread that calls ``answers``. What they share is guarded by ``_lock``.
    Copies and names are made under ``_making``, one at a time, so that ten joiners that ask at once
    do not cost ten of them.

    Args:
        timeout: How long a joiner is kept waiting for an offer, beside the time for its bytes.

    Attributes:
        answers: For a ``PeerServer``: ``latest`` gives the manager's step, which is 0 without a
            state, the size, and whether the group is in a sync; ``copy`` a state of that step, or
            of an older one that is being sent; ``offer`` what is offered in the quorum of a step;
            ``state`` a part of either, by name.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.answers: Mapping[str, Callable[..., Any]] = {
            "latest": lambda: self._latest(),
            "copy": self._offer_copy,
            "offer": self._offer_in_quorum,
            "state": self._part,
        }
        self._lock = threading.Condition()
        self._making = threading.Lock()
        self._latest: Callable[[], Offer] = _no_offer
        self._source: GlobalState | None = None
        self._named = _NOT_NAMED
        # The copy lives as long as somebody holds it: the list, once for each joiner that has asked
        # for its name and not for its bytes, and each connection that is sending it.
        self._wanted: list[_Copy] = []
        self._copy: Callable[[], _Copy | None] = lambda: None
        # By the manager step of the quorum, as text: the one that is open, or none.
        self._quorums: dict[str, _Quorum] = {}

    def serve(
        self,
        step: Callable[[], int],
        source: GlobalState,
        is_syncing: Callable[[], bool] = bool,
    ) -> None:
        """Offer the global state outside of quorums too, from now on.

        Args:
            step: Returns the manager's step. It may be called at any time, from any thread.
            source: The global state.
            is_syncing: Returns whether the group is between a quorum and its vote; called in the
                same way.
        """
        self._source = source
        self._latest = lambda: Offer(step(), source.num_bytes, is_syncing())

    def open(self, step: int, state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Offer the state of a quorum until ``close``.

        Args:
            step: The manager step of the quorum.
            state: The global state: the tensors themselves, not to be changed before ``close``.
            rest: Further state that torchft sends with it. It is copied.
        """
        # As bytes, now: with a delay this group trains on while a joiner is still to ask for it.
        body = [memoryview(b"".join(state_bytes.dump(rest)))]
        version = object() if self._source is None else self._source.version
        quorum = _Quorum(version, state, Part.of(body), body)
        with self._lock:
            self._quorums = {str(step): quorum}
            self._lock.notify_all()

    def close(self) -> None:
        """End the offer of a quorum, and drop a copy that nobody has fetched in time."""
        with self._lock:
            self._quorums = {}
            if self._wanted and time.monotonic() - self._wanted[0].made_at >= KEPT_S:
                self._wanted.clear()

    def stop(self) -> None:
        """End all offers. Transfers that have begun are completed."""
        with self._lock:
            self._source = None
            self._latest = _no_offer
            self._quorums = {}
            self._wanted.clear()

    # ---- in a quorum -------------------------------------------------------------------------

    def _offer_in_quorum(self, step: str) -> Offer:
        source = self._source
        limit_s = answer_limit_s(self._timeout, self._latest().num_bytes)
        with self._lock:
            # A joiner may ask before this group has made its offer. Without the wait the answer
            # would be that there is nothing, and the sync would fail for all groups.
            self._lock.wait_for(lambda: step in self._quorums, limit_s)
            quorum = self._quorums[step]
        with self._making:
            part = self._name(quorum.version, lambda: quorum.body)
            if source is not None and source.version != quorum.version:
                self._named = _NOT_NAMED  # the vote is over; the bytes have changed while hashed
                raise KeyError(step)
        return Offer(int(step), state=part, rest=quorum.rest)

    def _name(self, version: Hashable, body: Callable[[], Body]) -> Part:
        """The name and size of a version of the state. The caller holds ``_making``."""
        if self._named[0] != version:
            self._named = version, Part.of(body())
        return self._named[1]

    # ---- at any time -------------------------------------------------------------------------

    def _offer_copy(self) -> Offer:
        source = self._source
        if source is None:
            raise KeyError("copy")
        with self._making:
            version = source.version
            with self._lock:
                if self._wanted and self._wanted[0].version != version:
                    self._wanted.clear()  # frees its memory before the next copy is made
                copy = self._copy()
            if copy is None:
                copy = self._make_copy(source)
            with self._lock:
                self._copy = weakref.ref(copy)
                self._wanted.append(copy)
            return copy.offer

    def _make_copy(self, source: GlobalState) -> _Copy:
        """Copy the state, if possible without the lock that an outer step would wait for."""
        made = self._dump(source) or self._dump(source)
        if made is None:  # rounds are shorter than a copy takes
            with source.lock:
                made = self._dump(source)
        assert made is not None, "the state does not change while it is held"
        step, version, body = made
        offer = Offer(step, state=self._name(version, lambda: body))
        return _Copy(body, version, offer, time.monotonic())

    def _dump(self, source: GlobalState) -> tuple[int, Hashable, Body] | None:
        """The manager's step, the state's version and a copy; None if the state has changed."""
        step = self._latest().step
        version = source.version
        body = state_bytes.dump(source.for_joiner(), copies=True)
        if source.version != version:
            return None
        return step, version, body

    def _part(self, name: str) -> Served:
        with self._lock:
            copy = self._copy()
            version, named = self._named
            quorums = self._quorums
            if copy is not None and copy.offer.state.name == name:
                if self._wanted:
                    self._wanted.pop()
                return copy
        for quorum in quorums.values():
            if name == quorum.rest.name:
                return Served(quorum.rest_body)
            if name == named.name and version == quorum.version:
                return Served(quorum.body)  # without the lock: it may be copied to the host now
        raise KeyError(name)
