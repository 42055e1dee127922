"""Where the members of a quorum say whether they are going to connect, before any of them does."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class Rendezvous:
    """The answers of one quorum's members, in the stores that they host.

    gloo waits ``timeout`` for a member that does not connect, for example because it cannot reach
    one of the others. So each member says in the store of the first one that it is going to
    connect, and waits until all have. One that cannot says so in every store that it reaches, and
    whoever reads that passes it on: so all know at once, also if the first member's store is what
    one of them cannot reach.

    Args:
        addresses: ``host:port`` of each member's store, by the member's name, in their order.
        own_name: The name of this member.
        number: The connection's number, different from that of any other.
        timeout: Limit of reaching a store; answers may take twice as long.
    """

    POLL_S = 0.02

    def __init__(
        self, addresses: Mapping[str, str], own_name: str, number: int, timeout: timedelta
    ) -> None:
        self._addresses = addresses
        self._own_name = own_name
        self._timeout = timeout
        self._declined = f"connects/{number}/declined"
        self._answers = {name: f"connects/{number}/{name}" for name in addresses}

    def decline(self, unreachable: Collection[str], who: str | None = None) -> None:
        """Say that somebody does not connect, in the stores of the members that can be reached.

        Args:
            unreachable: The names of the others.
            who: The member that does not. None: this one.
        """
        for name in self._addresses:
            if name not in unreachable:
                with suppress(RuntimeError):  # torch's own: it has gone meanwhile
                    self._store(name).set(self._declined, who or self._own_name)

    def wait_for_all(self) -> None:
        """Say that this member connects, and wait until all members have said so.

        Raises:
            ConnectionError: One does not connect, or has not answered in time.
        """
        try:
            self._wait_for_all()
        except RuntimeError as error:  # torch's own
            raise ConnectionError(
                f"the store of a quorum's member has gone: {str(error).splitlines()[0]}"
            ) from error

    def _wait_for_all(self) -> None:
        limit_s = 2 * self._timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        first, own = self._store(next(iter(self._addresses))), self._store(self._own_name)
        first.set(self._answers[self._own_name], "yes")
        while not _has(first, *self._answers.values()):
            for store in (first, own):
                if _has(store, self._declined):
                    who = store.get(self._declined).decode()
                    self.decline((), who)
                    who = who.partition(":")[0]
                    raise ConnectionError(f"replica group {who} cannot reach all others")
            if time.monotonic() > deadline:
                missing = [name for name, key in self._answers.items() if not _has(first, key)]
                raise ConnectionError(
                    f"replica group {missing[0].partition(':')[0]} has not said within "
                    f"{limit_s:g} s that it can connect"
                )
            time.sleep(self.POLL_S)

    def _store(self, name: str) -> TCPStore:
        host, _, port = self._addresses[name].rpartition(":")
        return TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False,
            timeout=self._timeout,
        )  # fmt: skip


def _has(store: TCPStore, *keys: str) -> bool:
    return store.check(list(keys))  # pyright: ignore[reportAttributeAccessIssue]
