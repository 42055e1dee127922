"""Tells all members of a quorum at once that its allreduce is broken."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

log = logging.getLogger(__name__)

_FOR_EVER = timedelta(days=3650)


class SyncAlarm:
    """One connection's alarm, which any of its members can raise and all of them hear.

    gloo does not tell all members of an error. In a ring of five or more, one that has no
    connection with the failed member may wait for ``timeout`` in a send that nobody receives, and
    the others wait for it in the next quorum. So the first member that sees an error writes a key
    into the store that the members met at, and each member has a thread that waits for the key.
    The store is on the first member's machine: when it is gone, that is an alarm too.

    Args:
        store_addr: ``host:port`` of the store of the connection's first member.
        number: The connection's number, different from that of any other.
        timeout: Limit of reaching the store.
    """

    def __init__(self, store_addr: str, number: int, timeout: timedelta) -> None:
        host, _, port = store_addr.rpartition(":")
        self._host, self._port, self._timeout = host.strip("[]"), int(port), timeout
        self._key = f"alarm/{number}"
        self._raised_at: float | None = None
        self._start(self._listen)

    def _start(self, target: object) -> None:
        # Daemons: neither the wait nor a store that does not answer may hold up a process's end.
        threading.Thread(target=target, name="sync_alarm", daemon=True).start()  # pyright: ignore

    def _store(self) -> TCPStore:
        # A client of its own for each call: a wait occupies a client until it ends.
        return TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._timeout
        )

    def _listen(self) -> None:
        try:
            self._store().wait([self._key], _FOR_EVER)
        except RuntimeError as error:  # torch's own: the store is gone
            log.debug("The store of the quorum's first member is gone: %s", error)
        self._note()

    def _note(self) -> None:
        if self._raised_at is None:
            self._raised_at = time.monotonic()

    def raise_for_all(self) -> None:
        """Tell the members, without waiting for them. It also ends the thread that listens."""
        if self._raised_at is None:
            self._note()
            self._start(self._tell)

    def _tell(self) -> None:
        try:
            self._store().set(self._key, "raised")
        except RuntimeError as error:
            log.debug("The store of the quorum's first member is gone: %s", error)

    def age_s(self) -> float | None:
        """How long ago it was raised, in seconds; None if it has not been."""
        return None if self._raised_at is None else time.monotonic() - self._raised_at
