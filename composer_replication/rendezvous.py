"""Where the members of a quorum say that they are going to connect, before any of them does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class Rendezvous:
    """The answers of one quorum's members, in the store of the first one.

    gloo waits ``timeout`` for a member that does not connect, for example because it cannot reach
    one of the others. With the answers all others know at once that there is no need to wait.

    Args:
        store_addr: ``host:port`` of the store of the first member.
        number: The connection's number, different from that of any other.
        members: The names of all members, in their order.
        timeout: Limit of connecting to the store; answers may take twice as long.
    """

    def __init__(
        self, store_addr: str, number: int, members: Sequence[str], timeout: timedelta
    ) -> None:
        host, _, port = store_addr.rpartition(":")
        self._host, self._port, self._timeout = host.strip("[]"), int(port), timeout
        self._keys = {name: f"connects/{number}/{name}" for name in members}

    def decline(self, name: str) -> None:
        """Say that this member does not connect, if the store can be reached."""
        with suppress(RuntimeError):  # torch's own
            self._store().set(self._keys[name], "no")

    def wait_for_all(self, name: str) -> None:
        """Say that this member connects, and wait until all members have answered.

        Raises:
            ConnectionError: Another one does not connect, or has not answered in time.
        """
        try:
            store = self._store()
            store.set(self._keys[name], "yes")
            store.wait(list(self._keys.values()), 2 * self._timeout)
            absent = [name for name, key in self._keys.items() if store.get(key) != b"yes"]
        except RuntimeError as error:
            raise ConnectionError(
                "not all members of the quorum said within "
                f"{2 * self._timeout.total_seconds():g} s that they can connect: "
                f"{str(error).splitlines()[0]}"
            ) from error
        if absent:
            groups = ", ".join(member.partition(":")[0] for member in absent)
            raise ConnectionError(f"replica group {groups} cannot reach all others, see its log")

    def _store(self) -> TCPStore:
        return TCPStore(
            self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._timeout
        )
