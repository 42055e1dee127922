"""Tells all members of a quorum at once that a collective of theirs has failed."""

from __future__ import annotations

import logging
import threading
import time

from composer_replication.replica.notice_board import Notices

log = logging.getLogger(__name__)


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
        notices: The notices on the first member's board.
        number: The connection's number, different from that of any other.
    """

    POLL_S = 0.25

    def __init__(self, notices: Notices, number: int) -> None:
        self._notices = notices
        self._key = f"alarm/{number}"
        self._raised_at: float | None = None
        self._asked_at = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._poll, name="sync_alarm", daemon=True).start()

    def _poll(self) -> None:
        while not self._closed.wait(self.POLL_S) and self._raised_at is None:
            if time.monotonic() - self._asked_at > 4 * self.POLL_S:
                continue  # nobody waits for a collective, so a training group sends no requests
            try:
                is_raised = bool(self._notices.read([self._key]))
            except OSError as error:
                log.debug("The board of the quorum's first member is gone: %s", error)
                is_raised = True
            if is_raised:
                self._note()

    # ``_raised_at`` needs no lock: it changes once, from None to a number, and whichever thread
    # comes first, all of them see an alarm.

    def _note(self) -> None:
        if self._raised_at is None:
            self._raised_at = time.monotonic()

    def raise_for_all(self) -> None:
        """Raise the alarm, once. It is posted on another thread, so the caller does not wait."""
        if self._raised_at is None:
            self._note()
            # Not a daemon thread: a process that ends because of the error still posts it first.
            threading.Thread(target=self._post, name="raise_sync_alarm").start()

    def _post(self) -> None:
        try:
            self._notices.post(self._key, "raised")
        except OSError as error:
            log.debug("The board of the quorum's first member is gone: %s", error)

    def age_s(self) -> float | None:
        """How long ago the alarm was raised, in seconds; None if it has not been raised.

        The board is read only while this method is called again and again.
        """
        self._asked_at = time.monotonic()
        return None if self._raised_at is None else self._asked_at - self._raised_at

    def close(self) -> None:
        """Stop reading the board: the members have another connection now."""
        self._closed.set()
