"""How the members of a quorum agree that all can connect, and that a sync of theirs has failed."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from composer_replication.replica.addresses import does_answer
from composer_replication.replica.quorum import group_name

log = logging.getLogger(__name__)

Board = Callable[..., Any]
"""``PeerClient.ask`` of one member's server, which keeps notices: ``post`` one under a key, or
``read`` those of some keys, as a dict. It raises a PeerError if the server cannot be reached.

torch's TCPStore could hold them. But its client looks up the host name of every address that it
connects to, which takes seconds where no name server answers. Its calls have no time limit, so a
stopped member would stop every member that asks it. And it writes stack traces to stderr when a
peer has gone.
"""


def find_unreachable(handles: Mapping[str, Mapping[str, Any]], timeout_s: float) -> tuple[str, ...]:
    """Find the members of a quorum whose address does not answer.

    gloo would wait for such a member until its timeout, and not say which one it is.

    Args:
        handles: torchft's handles, by the lighthouse's name of the member.
        timeout_s: Limit of each connection, in seconds. The members are tried at the same time, the
            IP addresses of a name one after the other.
    """

    def is_silent(name: str) -> bool:
        return not does_answer(handles[name]["store"], timeout_s)

    with ThreadPoolExecutor(len(handles)) as pool:
        return tuple(itertools.compress(handles, pool.map(is_silent, handles)))


class Rendezvous:
    """Lets the members of a quorum agree that all of them connect, by notices.

    gloo waits for ``timeout`` if one member does not connect, for example because it cannot reach
    another one. So each member posts on the first member's board that it is going to connect, and
    waits until all have done so. A member that cannot connect posts that on every board that it
    reaches, and each reader passes it on. So all members learn it at once, even if one of them
    cannot reach the first member's board.

    Args:
        boards: Those of all members, by the lighthouse's name of the member, in the order of
            the quorum.
        own_name: The name of this member.
        number: The connection's number, different from that of any other.
        limit_s: How long the others may take, in seconds.
    """

    POLL_S = 0.02
    LOOK_EVERY_S = 1.0

    def __init__(
        self,
        boards: Mapping[str, Board],
        own_name: str,
        number: int,
        limit_s: float,
    ) -> None:
        self._boards = boards
        self._own_name = own_name
        self._limit_s = limit_s
        self._declined = f"connects/{number}/declined"
        self._answers = {name: f"connects/{number}/{name}" for name in boards}

    def decline(self, unreachable: Collection[str], declining: str | None = None) -> None:
        """Post that a member does not connect, on the boards that can be reached.

        Args:
            unreachable: The names of the members whose boards are not tried.
            declining: The member that does not connect. None: this one.
        """
        for name, board in self._boards.items():
            if name not in unreachable:
                try:
                    board("post", self._declined, declining or self._own_name)
                except OSError:
                    continue  # that member has left meanwhile

    def wait_for_all(self) -> None:
        """Post that this member connects, and wait until all members have posted the same.

        Raises:
            ConnectionError: A member does not connect, has gone, or has not answered within
                ``limit_s``.
        """
        began = time.monotonic()
        looked = began
        first = next(iter(self._boards.values()))
        own = self._boards[self._own_name]
        first("post", self._answers[self._own_name], "yes")
        while True:
            # The declining member may not reach the first member's board.
            answers = own("read", self._declined)
            answers |= first("read", self._declined, *self._answers.values())
            declining = answers.get(self._declined)
            if declining is not None:
                self.decline((), declining)
                raise ConnectionError(
                    f"replica group {group_name(declining)} cannot reach all others"
                )
            missing = [name for name, key in self._answers.items() if key not in answers]
            if not missing:
                return
            now = time.monotonic()
            if now > began + self._limit_s:
                raise ConnectionError(
                    f"replica group {group_name(missing[0])} has not said within "
                    f"{self._limit_s:g} s that it can connect: it hangs, or its log says why it "
                    "has left this group out"
                )
            if now > looked + self.LOOK_EVERY_S:
                looked = now
                self._look_for(missing)
            time.sleep(self.POLL_S)

    def _look_for(self, missing: Collection[str]) -> None:
        """Find a member that has died since its address was tried. One that is slow answers."""
        for name in missing:
            try:
                self._boards[name]("read")
            except OSError as error:
                self.decline([name])
                raise ConnectionError(
                    f"replica group {group_name(name)} has gone: {error}"
                ) from error


class SyncAlarm:
    """The alarm of one connection. Each member can raise it, and all members see it.

    gloo does not report an error to all members. In a ring of five or more, a member without a link
    to the failed one may wait for ``timeout`` in a send that nobody receives, and the others wait
    for it in the next quorum. So the first member that sees an error posts a notice on the board of
    the quorum's first member. Members that wait for a collective read that board. If the board does
    not answer any more, that is an alarm too.

    Threads: the main thread asks ``age_s`` while it waits for a collective. A thread of this class
    reads the board, since a board that does not answer would block the main thread for the time
    limit of a request, and with it signals.

    Args:
        board: The first member's.
        number: The connection's number, different from that of any other.
    """

    POLL_S = 0.25

    def __init__(self, board: Board, number: int) -> None:
        self._board = board
        self._key = f"alarm/{number}"
        self._raised_at: float | None = None
        self._asked_at = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._poll, name="sync_alarm", daemon=True).start()

    def _poll(self) -> None:
        while not self._closed.wait(self.POLL_S) and self._raised_at is None:
            if time.monotonic() - self._asked_at > 4 * self.POLL_S:
                continue  # no thread waits for a collective: a group in training sends no requests
            try:
                if not self._board("read", self._key):
                    continue
            except Exception as error:  # without this thread the group would wait for its timeout
                _log_unusable(error)
            # It needs no lock: it changes from None to a number. If two threads set it at the same
            # time, both see an alarm.
            self._raised_at = time.monotonic()

    def raise_for_all(self) -> None:
        """Raise the alarm, once. It is posted on another thread, so the caller does not wait."""
        if self._raised_at is None:
            self._raised_at = time.monotonic()
            # Not a daemon thread: a process that ends because of the error still posts it first.
            threading.Thread(target=self._post, name="raise_sync_alarm").start()

    def _post(self) -> None:
        try:
            self._board("post", self._key, "raised")
        except Exception as error:
            _log_unusable(error)

    def age_s(self) -> float | None:
        """How long ago the alarm was raised, in seconds; None if it has not been raised.

        The board is read only while somebody calls this method repeatedly.
        """
        self._asked_at = time.monotonic()
        return None if self._raised_at is None else self._asked_at - self._raised_at

    def close(self) -> None:
        """Stop reading the board: the members have another connection now."""
        self._closed.set()


def _log_unusable(error: Exception) -> None:
    """Log why a board cannot be used. With an ``OSError`` its member has only left or died."""
    log.log(
        logging.DEBUG if isinstance(error, OSError) else logging.WARNING,
        "Cannot use the board of the quorum's first member: %s: %s",
        type(error).__name__,
        error,
    )
