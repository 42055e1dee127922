"""Where the members of a quorum say whether they are going to connect, before any of them does."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from composer_replication.replica.notice_board import Notices


class Rendezvous:
    """The answers of one quorum's members, at their notice boards.

    gloo waits ``timeout`` for a member that does not connect, for example because it cannot reach
    one of the others. So each member says at the first one's board that it is going to connect, and
    waits until all have. One that cannot says so at every board that it reaches, and whoever reads
    that passes it on: so all know at once, also if the first member's board is what one of them
    cannot reach.

    Args:
        boards: The notices of each member, by the member's name, in their order.
        own_name: The name of this member.
        number: The connection's number, different from that of any other.
        limit_s: How long the others may take, in seconds.
    """

    POLL_S = 0.02

    def __init__(
        self, boards: Mapping[str, Notices], own_name: str, number: int, limit_s: float
    ) -> None:
        self._boards = boards
        self._own_name = own_name
        self._limit_s = limit_s
        self._declined = f"connects/{number}/declined"
        self._answers = {name: f"connects/{number}/{name}" for name in boards}

    def decline(self, unreachable: Collection[str], who: str | None = None) -> None:
        """Say that somebody does not connect, to the members that can be reached.

        Args:
            unreachable: The names of the others.
            who: The member that does not. None: this one.
        """
        for name, board in self._boards.items():
            if name not in unreachable:
                try:
                    board.post(self._declined, who or self._own_name)
                except OSError:
                    continue  # it has gone meanwhile

    def wait_for_all(self) -> None:
        """Say that this member connects, and wait until all members have said so.

        Raises:
            ConnectionError: One does not connect, or has not answered in time.
        """
        try:
            self._wait_for_all()
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            raise ConnectionError(f"a member of the quorum has gone: {error}") from error

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self._limit_s
        first, own = next(iter(self._boards.values())), self._boards[self._own_name]
        first.post(self._answers[self._own_name], "yes")
        while True:
            found = first.read([*self._answers.values(), self._declined])
            who = found.get(self._declined) or own.read([self._declined]).get(self._declined)
            if who:
                self.decline((), who)
                who = who.partition(":")[0]
                raise ConnectionError(f"replica group {who} cannot reach all others")
            if len(found) == len(self._answers):
                return
            if time.monotonic() > deadline:
                missing = next(name for name, key in self._answers.items() if key not in found)
                raise ConnectionError(
                    f"replica group {missing.partition(':')[0]} has not said within "
                    f"{self._limit_s:g} s that it can connect"
                )
            time.sleep(self.POLL_S)
