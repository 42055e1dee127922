"""Tells all members of a quorum at once that its allreduce is broken."""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from weakref import WeakSet

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

log = logging.getLogger(__name__)


class SyncAlarm:
    """One connection's alarm, which any of its members can raise and all of them see.

    gloo does not tell all members of an error. In a ring of five or more, one that has no
    connection with the failed member may wait for ``timeout`` in a send that nobody receives, and
    the others wait for it in the next quorum. So the first member that sees an error writes a key
    into the store that the members met at, and those that wait for an allreduce look for the key.
    The store is on the first member's machine: when it is gone, that is an alarm too.

    Args:
        store_addr: ``host:port`` of the store of the connection's first member.
        number: The connection's number, different from that of any other.
        timeout: Limit of reaching the store.
    """

    POLL_S = 0.25

    def __init__(self, store_addr: str, number: int, timeout: timedelta) -> None:
        host, _, port = store_addr.rpartition(":")
        self._host, self._port, self._timeout = host.strip("[]"), int(port), timeout
        self._key = f"alarm/{number}"
        self._raised_at: float | None = None
        self._asked_at = 0.0
        self._closed = threading.Event()
        # A thread, since a store that does not answer blocks whoever asks it for the timeout.
        self._thread = threading.Thread(target=self._poll, name="sync_alarm", daemon=True)
        self._thread.start()
        _open.add(self)

    def _store(self) -> TCPStore:
        return TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._timeout
        )

    def _poll(self) -> None:
        try:
            timeout_s = self._timeout.total_seconds()
            with socket.create_connection((self._host, self._port), timeout_s) as probe:
                self._look_for_key(self._store(), probe)
        except (OSError, RuntimeError) as error:  # Python's own, torch's own
            log.debug("The store of the quorum's first member is gone: %s", error)
            self._note()

    def _look_for_key(self, store: TCPStore, probe: socket.socket) -> None:
        probe.setblocking(False)
        while not self._closed.wait(self.POLL_S) and self._raised_at is None:
            if time.monotonic() - self._asked_at > 4 * self.POLL_S:
                continue  # nobody waits for an allreduce
            # torch writes a long trace to stderr when it asks a store that is gone.
            with suppress(BlockingIOError):
                probe.recv(1)  # nothing is ever sent: the far end has closed
                raise ConnectionError(f"{self._host}:{self._port} has closed the connection")
            if store.check([self._key]):  # pyright: ignore[reportAttributeAccessIssue]
                self._note()

    def _note(self) -> None:
        if self._raised_at is None:
            self._raised_at = time.monotonic()

    def raise_for_all(self) -> None:
        """Tell the other members, without waiting for them; once."""
        if self._raised_at is None:
            self._note()
            threading.Thread(target=self._tell, name="raise_sync_alarm").start()

    def _tell(self) -> None:
        try:
            # torch would try a store that is gone until the timeout, and write to stderr.
            address, timeout_s = (self._host, self._port), self._timeout.total_seconds()
            socket.create_connection(address, timeout_s).close()
            self._store().set(self._key, "raised")
        except (OSError, RuntimeError) as error:
            log.debug("The store of the quorum's first member is gone: %s", error)

    def age_s(self) -> float | None:
        """How long ago it was raised, in seconds; None if it has not been.

        Who waits for an allreduce asks again and again: only then is the store looked at.
        """
        self._asked_at = time.monotonic()
        return None if self._raised_at is None else self._asked_at - self._raised_at

    def close(self) -> None:
        """The connection is another one now, or the process ends."""
        self._closed.set()


_open: WeakSet[SyncAlarm] = WeakSet()


@atexit.register
def _close_all() -> None:
    # A daemon thread that is inside torch when the interpreter ends would abort the process.
    for alarm in list(_open):
        alarm.close()
    for alarm in list(_open):
        alarm._thread.join(alarm._timeout.total_seconds())
