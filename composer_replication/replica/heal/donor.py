"""The donor's side of a heal: what this rank offers to joiners, and the one copy that it makes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from composer_replication.diloco.global_state import GlobalState
from composer_replication.replica.heal import state_bytes
from composer_replication.replica.heal.offers import Offer, Part, answer_limit_s
from composer_replication.replica.peer_server import Body

KEPT_S = 60.0
"""How long a copy of the state is kept for a joiner that has asked for its name, in seconds."""


@dataclass
class _Copy:
    """A copy of the global state for joiners outside of a quorum.

    Attributes:
        version: The version of the state, see ``GlobalState``.
        step: The manager's step when it was made.
        part: Its name and size.
        body: Its bytes.
        made_at: When it was made, by ``time.monotonic``.
        wanted: How many joiners have asked for its name and not for its bytes.
        readers: To how many joiners it is being sent.
    """

    version: Hashable
    step: int
    part: Part
    body: Body
    made_at: float
    wanted: int = 0
    readers: int = 0


@dataclass
class _Quorum:
    """What this group offers while it waits in a quorum with a joiner.

    Attributes:
        step: The manager step of the quorum.
        version: The version of the global state.
        state: The global state: the tensors themselves, which do not change before the vote.
        rest: Name and size of the rest.
        rest_body: The bytes of the rest.
    """

    step: int
    version: Hashable
    state: Mapping[str, Any]
    rest: Part
    rest_body: Body

    @functools.cached_property
    def body(self) -> Body:
        """The bytes of the global state, without a copy where it lies in host memory."""
        return state_bytes.dump(self.state)


class Donor:
    """Answers joiners: with names at once where they are known, and with bytes.

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
            state, the size, and whether the group is in a sync; ``copy`` a state of that step;
            ``offer`` what is offered in the quorum of a step; ``state`` a part of either, by name.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.answers: Mapping[str, Callable[..., Any]] = {
            "latest": self._latest,
            "copy": self._offer_copy,
            "offer": self._offer_in_quorum,
            "state": self._part,
        }
        self._lock = threading.Condition()
        self._making = threading.Lock()
        self._step: Callable[[], int] = int
        self._is_syncing: Callable[[], bool] = bool
        self._source: GlobalState | None = None
        self._named: tuple[Hashable, Part] | None = None
        self._copy: _Copy | None = None
        self._quorum: _Quorum | None = None

    def serve(
        self, step: Callable[[], int], source: GlobalState, is_syncing: Callable[[], bool] = bool
    ) -> None:
        """Offer the global state outside of quorums too, from now on.

        Args:
            step: Gives the manager's step. It may be called at any time, from any thread.
            source: The global state.
            is_syncing: Gives whether the group is between a quorum and its vote; called likewise.
        """
        self._step, self._source, self._is_syncing = step, source, is_syncing

    def open(self, step: int, state: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Offer the state of a quorum until ``close``.

        Args:
            step: The manager step of the quorum.
            state: The global state: the tensors themselves, not to be changed before ``close``.
            rest: What goes with it. It is copied.
        """
        # As bytes, now: with a delay this group trains on while a joiner is still to ask for it.
        body = [memoryview(b"".join(state_bytes.dump(rest)))]
        part = Part(state_bytes.digest(body), len(body[0]))
        version = object() if self._source is None else self._source.version
        with self._lock:
            self._quorum = _Quorum(step, version, state, part, body)
            self._lock.notify_all()

    def close(self) -> None:
        """End the offer of a quorum, and drop a copy that nobody has fetched in time."""
        with self._lock:
            self._quorum = None
            copy = self._copy
            if copy is not None and time.monotonic() - copy.made_at >= KEPT_S:
                copy.wanted = 0
            self._drop_unwanted()

    def stop(self) -> None:
        """Offer nothing any more. What is being sent is sent to its end."""
        with self._lock:
            self._source = self._copy = self._quorum = None

    def _latest(self) -> Offer:
        return Offer(self._step(), self._num_bytes(), self._is_syncing())

    # ---- in a quorum -------------------------------------------------------------------------

    def _offer_in_quorum(self, step: str) -> Offer:
        source = self._source
        with self._lock:
            # A joiner may ask before this group has made its offer. Without the wait it would be
            # told that there is nothing, and the sync would fail for all groups.
            self._lock.wait_for(
                lambda: self._is_at(step), answer_limit_s(self._timeout, self._num_bytes())
            )
            quorum = self._quorum
        if quorum is None or str(quorum.step) != step:
            raise KeyError(step)
        with self._making:
            part = self._name(quorum.version, lambda: quorum.body)
            if source is not None and source.version != quorum.version:
                self._named = None  # the vote is over, and the bytes have changed while hashed
                raise KeyError(step)
        return Offer(quorum.step, part.num_bytes, state=part, rest=quorum.rest)

    def _num_bytes(self) -> int:
        return 0 if self._source is None else self._source.num_bytes

    def _is_at(self, step: str) -> bool:
        return self._quorum is not None and str(self._quorum.step) == step

    def _name(self, version: Hashable, body: Callable[[], Body]) -> Part:
        """The name and size of a version of the state. The caller holds ``_making``."""
        if self._named is None or self._named[0] != version:
            parts = body()
            part = Part(state_bytes.digest(parts), sum(map(len, parts)))
            self._named = version, part
        return self._named[1]

    def _is_named(self, name: str, version: Hashable) -> bool:
        named = self._named
        return named is not None and named[0] == version and named[1].name == name

    # ---- at any time -------------------------------------------------------------------------

    def _offer_copy(self) -> Offer:
        source = self._source
        if source is None:
            raise KeyError("copy")
        with self._making:
            version = source.version
            with self._lock:
                copy = self._copy
                if copy is not None and copy.version != version and not copy.readers:
                    copy = self._copy = None  # before there is another one
            if copy is None:
                copy = self._make_copy(source)
            with self._lock:
                self._copy = copy
                copy.wanted += 1
            return Offer(copy.step, copy.part.num_bytes, state=copy.part)

    def _make_copy(self, source: GlobalState) -> _Copy:
        """Copy the state, if possible without the lock that an outer step would wait for."""
        made = self._dump(source) or self._dump(source)
        if made is None:  # rounds are shorter than a copy takes
            with source.held():
                made = self._dump(source)
        assert made is not None, "the state does not change while it is held"
        step, version, body = made
        return _Copy(version, step, self._name(version, lambda: body), body, time.monotonic())

    def _dump(self, source: GlobalState) -> tuple[int, Hashable, Body] | None:
        """The manager's step, the state's version and a copy; None if the state has changed."""
        step, version = self._step(), source.version
        body = state_bytes.dump(source.for_joiner(), copies=True)
        return (step, version, body) if source.version == version else None

    @contextmanager
    def _part(self, name: str) -> Iterator[Body]:
        with self._lock:
            copy, quorum = self._copy, self._quorum
            is_copy = copy is not None and copy.part.name == name
            if copy is not None and is_copy:
                copy.wanted, copy.readers = max(0, copy.wanted - 1), copy.readers + 1
        if copy is not None and is_copy:
            try:
                yield copy.body
            finally:
                with self._lock:
                    copy.readers -= 1
                    self._drop_unwanted()
        elif quorum is not None and name == quorum.rest.name:
            yield quorum.rest_body
        elif quorum is not None and self._is_named(name, quorum.version):
            yield quorum.body
        else:
            raise KeyError(name)

    def _drop_unwanted(self) -> None:
        """Drop the copy, if there is one that nobody wants. The caller holds ``_lock``."""
        copy = self._copy
        if copy is not None and not copy.wanted and not copy.readers:
            self._copy = None
