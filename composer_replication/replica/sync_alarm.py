"""Tells all members of a quorum at once that its allreduce is broken."""

from __future__ import annotations

import logging
import threading
import time

from composer_replication.replica.notice_board import Notices

log = logging.getLogger(__name__)


class SyncAlarm:
    """One connection's alarm, which any of its members can raise and all of them see.

    gloo does not tell all members of an error. In a ring of five or more, one that has no
    connection with the failed member may wait for ``timeout`` in a send that nobody receives, and
    the others wait for it in the next quorum. So the first member that sees an error leaves a
    notice at the board of the quorum's first member, and those that wait for an allreduce look for
    it. When that board is gone, that is an alarm too.

    Args:
        notices: At the first member's board.
        number: The connection's number, different from that of any other.
    """

    POLL_S = 0.25

    def __init__(self, notices: Notices, number: int) -> None:
        self._notices = notices
        self._key = f"alarm/{number}"
        self._raised_at: float | None = None
        self._asked_at = 0.0
        self._closed = threading.Event()
        # A thread, since a board that does not answer blocks whoever asks it for its time limit.
        threading.Thread(target=self._poll, name="sync_alarm", daemon=True).start()

    def _poll(self) -> None:
        while not self._closed.wait(self.POLL_S) and self._raised_at is None:
            if time.monotonic() - self._asked_at > 4 * self.POLL_S:
                continue  # nobody waits for an allreduce
            try:
                is_raised = bool(self._notices.read([self._key]))
            except OSError as error:
                log.debug("The board of the quorum's first member is gone: %s", error)
                is_raised = True
            if is_raised:
                self._note()

    def _note(self) -> None:
        if self._raised_at is None:
            self._raised_at = time.monotonic()

    def raise_for_all(self) -> None:
        """Tell the other members, without waiting for them; once."""
        if self._raised_at is None:
            self._note()
            # Not a daemon: who leaves because of an error still tells the others.
            threading.Thread(target=self._tell, name="raise_sync_alarm").start()

    def _tell(self) -> None:
        try:
            self._notices.post(self._key, "raised")
        except OSError as error:
            log.debug("The board of the quorum's first member is gone: %s", error)

    def age_s(self) -> float | None:
        """How long ago it was raised, in seconds; None if it has not been.

        Who waits for an allreduce asks again and again: only then is the board looked at.
        """
        self._asked_at = time.monotonic()
        return None if self._raised_at is None else self._asked_at - self._raised_at

    def close(self) -> None:
        """The connection is another one now."""
        self._closed.set()
