"""For which members of the previous quorum this group waits before it uses a new one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable

from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.quorum import group_names

log = logging.getLogger(__name__)


class MissingMembers:
    """The members of the previous quorum for which this group waits before it uses a new quorum.

    A lighthouse that has been restarted, or that nobody could reach for a while, gives the first
    group that asks a quorum of its own. If that group trained on alone, the run would fork. So it
    declines the quorum and asks again, until the others are in it or count as dead.

    Args:
        read_alive: Reads the names of the members that have sent the lighthouse a heartbeat lately;
            empty if the lighthouse does not answer.

    Attributes:
        names: The lighthouse's names of the members waited for.
        deadline: When the wait for them ends, by ``time.monotonic``: ``STRAGGLER_TIMEOUT_S`` after
            the first quorum that lacked them, or sooner if they are alive. None: it has not begun,
            as after a request that failed.
    """

    HEARTBEAT_WITHIN_S = 5.0
    """How long a restarted lighthouse may take to receive a heartbeat of a living member."""

    GONE_WITHIN_S = 1.0
    """How long a member that this lighthouse has shown as alive may be missing on its page until it
    counts as dead. Members send a heartbeat every 0.1 s."""

    WAIT_FOR_LIVING_S = 4.0
    """How long to wait for a member that is alive and not in the quorum. One whose request failed
    asks again after 1 s. A member that was too slow for the lighthouse's join timeout, or that
    hangs, also looks like this, so the wait is short."""

    POLL_S = 0.1

    def __init__(self, read_alive: Callable[[], frozenset[str]]) -> None:
        self.read_alive = read_alive
        self.names: frozenset[str] = frozenset()
        self.deadline: float | None = None
        self._seen: frozenset[str] = frozenset()
        """Those of ``names`` that the lighthouse's page has shown as alive."""

    def add_all(self, members: Iterable[str]) -> None:
        """Wait for all these members: the lighthouse has been restarted and knows none of them."""
        self.names = self.names.union(members)
        self._seen = frozenset()
        self.deadline = None  # nobody could come while it was away

    def add_living(self, members: frozenset[str]) -> None:
        """Wait for those of these members that the lighthouse's page shows as alive.

        The wait has one deadline: for a member that stays alive and never asks for a quorum the
        group waits once, and not in every quorum that lacks it (``has_waited``).
        """
        living = members & self.read_alive()
        if living:
            log.warning("Asking for a quorum again: %s alive, and missing", group_names(living))
            deadline = time.monotonic() + self.WAIT_FOR_LIVING_S
            self.deadline = min(self.deadline or deadline, deadline)
            self.names |= living
            self._seen |= living

    @property
    def has_waited(self) -> bool:
        """Whether this group has waited until its deadline."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def update(self, reported: Iterable[Collection[str]], present: Iterable[str]) -> None:
        """Also wait for the members that others wait for, and no longer for those in the quorum.

        Args:
            reported: The members for which each member of the quorum waits. If they disagreed, one
                would use the quorum and wait in it for another that has declined it.
            present: The members of the quorum.
        """
        self.names = self.names.union(*reported).difference(present)
        self._seen &= self.names
        if self.names and self.deadline is None:
            self.deadline = time.monotonic() + STRAGGLER_TIMEOUT_S

    def wait(self) -> None:
        """Give the lighthouse time to hear of the members, then give up on the dead ones."""
        since = time.monotonic()
        # Members that are alive need a moment to ask too. Without this pause the group would ask
        # again at once, and a lighthouse that has all members it knows of answers at once.
        time.sleep(self.POLL_S)
        while True:
            alive = self.read_alive()
            silent = self.names - alive
            if not silent:
                break
            self._seen |= self.names & alive
            has_stopped = bool(alive) and silent <= self._seen
            limit_s = self.GONE_WITHIN_S if has_stopped else self.HEARTBEAT_WITHIN_S
            if time.monotonic() > since + limit_s:
                if alive:
                    self._drop(silent, "has not heard of")
                    return
                break  # The lighthouse is away again, or its page cannot be read from here.
            time.sleep(self.POLL_S)
        if self.has_waited:
            self._drop(self.names, "was not asked for a quorum by")

    def _drop(self, names: frozenset[str], reason: str) -> None:
        if names:
            log.warning(
                "Going on without those that the lighthouse %s: %s", reason, group_names(names)
            )
            self.names -= names
