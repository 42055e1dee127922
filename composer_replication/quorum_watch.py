"""What the members of a quorum tell each other of their past, and whether it may be used."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from composer_replication.group_layout import GroupLayout, parse_layout

log = logging.getLogger(__name__)


class QuorumFailed(ConnectionError):
    """The lighthouse, or the group's own manager server, gave no quorum."""


class QuorumDeclined(Exception):
    """The lighthouse has been restarted, and this quorum may lack groups that are alive.

    All members of the quorum decline it: ask again.
    """


class QuorumWatch:
    """The part of torchft's ManagerClient that a Manager calls, with an eye on the quorums.

    Ids only grow while a lighthouse lives. One that has come back counts from 1 again, and gives
    the first that asks a quorum of its own, since it has not heard of the others; gives it again
    when asked again, since all members of the last quorum are there; and comes to ids that were
    used before, under which some members may be connected and others not. What a member should do
    then depends on what the others have been through. So each adds to the handle that torchft hands
    around (``manager.py``, ``reconfigure_handle``):

    * ``last``: the id and the members of the quorum it had before;
    * ``awaits``: the members of that one which it has been missing since a restart;
    * ``connection``: what it is connected under, if it is;
    * ``layout``: its ranks and shards, see ``GroupLayout``.

    All members see the same handles, and come to the same answer. Each rank of a group sees those
    of the same rank in the others, and they part with those they await by clocks of their own: so
    the ranks of a group vote on every quorum. One that went on without another would vote on a
    commit, and wait there for one that asks for a quorum.

    Args:
        client: torchft's ``ManagerClient``.
        replica_name: What this group is called, to notice that another has the same name.
        reconnect: Called before a quorum whose members have to connect is returned.
        world_size: Ranks in this group.
        timeout: Limit of their vote.
    """

    def __init__(
        self,
        client: Any,
        replica_name: str,
        reconnect: Callable[[], None],
        world_size: int,
        timeout: timedelta,
    ) -> None:
        self._client = client
        self._replica_name = replica_name
        self._reconnect = reconnect
        self._world_size = world_size
        self._timeout = timeout
        self.should_commit = client.should_commit
        self.layout = GroupLayout(world_size)
        self.members: tuple[str, ...] = ()
        self.max_step = 0
        self.awaits: frozenset[str] = frozenset()
        self._last: list[Any] | None = None  # a list, as JSON gives it back
        self._connection: list[Any] | None = None

    def _quorum(self, **request: Any) -> Any:
        """Ask for a quorum.

        Raises:
            QuorumFailed: There is none.
            QuorumDeclined: There is one that its members do not use.
            SettingsMismatch: This group has other ranks or shards than the run.
            TimeoutError: Another rank of this group has not voted on it.
        """
        handle = json.loads(request["reconfigure_handle"])
        handle |= {
            "last": self._last,
            "awaits": sorted(self.awaits),
            "connection": self._connection,
            "layout": self.layout.told(),
        }
        request["reconfigure_handle"] = json.dumps(handle)
        try:
            quorum = self._client._quorum(**request)
        except Exception as error:  # Rust's own: a RuntimeError or a TimeoutError
            raise QuorumFailed(str(error).splitlines()[0]) from error
        told = [_told_in(handle) for handle in quorum.reconfigure_handles]
        is_used = self._is_usable(quorum, told)
        is_used = self.layout.fits(quorum.replica_ids, told) and is_used
        if self._world_size > 1:
            is_used = self._do_all_vote_for_it(request["group_rank"], request["step"], is_used)
        if not is_used:
            self.layout.check()
            raise QuorumDeclined
        self._connect_if_needed(quorum.quorum_id, told)
        return quorum

    def _do_all_vote_for_it(self, group_rank: int, step: int, vote: bool) -> bool:
        try:
            return self._client.should_commit(group_rank, step, vote, timeout=self._timeout)
        except (RuntimeError, TimeoutError) as error:  # Rust's own
            # No second try: the manager server would count this vote among those of the next one.
            raise TimeoutError(
                "another rank of this group did not vote on a quorum within timeout="
                f"{self._timeout.total_seconds():g}: it has died, or hangs. End the group, and "
                f"start it again ({str(error).splitlines()[0]})"
            ) from error

    def _is_usable(self, quorum: Any, told: list[dict[str, Any]]) -> bool:
        names = tuple(quorum.replica_ids)
        this = [quorum.quorum_id, list(names)]
        lasts = [member["last"] for member in told if member["last"] is not None]
        has_restarted = _are_of_two_lighthouses([*lasts, this])
        if has_restarted:
            log.warning(
                "The lighthouse has been restarted: quorum id %d after %s",
                this[0],
                " and ".join(sorted({str(last[0]) for last in lasts})),
            )
            self.awaits = self.awaits.union(self.members)
        self._last, self.members, self.max_step = this, names, quorum.max_step
        self.awaits = self.awaits.union(*(member["awaits"] for member in told)) - set(names)
        return not has_restarted and not self.awaits

    def _connect_if_needed(self, quorum_id: int, told: list[dict[str, Any]]) -> None:
        self._warn_of_twins()
        current = [quorum_id, len(self.members)]
        keeps = self._connection is not None and self._connection[:2] == current
        if not keeps or any(member["connection"] != self._connection for member in told):
            self._reconnect()

    def _warn_of_twins(self) -> None:
        if sum(name.partition(":")[0] == self._replica_name for name in self.members) > 1:
            log.warning(
                "replica_id=%r is in this quorum twice: ranks of a group whose launcher has died "
                "may be left, or two groups have been given the same one",
                self._replica_name,
            )

    def connected(self, quorum_id: int, unique: int) -> None:
        """The members of the last quorum are connected, under a number that they all have."""
        self._connection = [quorum_id, len(self.members), unique]

    def disconnected(self) -> None:
        self._connection = None


def _are_of_two_lighthouses(quorums: list[list[Any]]) -> bool:
    """Whether these, each an id and its members, cannot all be of one life of a lighthouse.

    Within a life an id has the same members always, and this quorum, the last of them, has the
    highest. New groups that ask a restarted lighthouse first may raise its ids above those of the
    groups in training: then none of these was in the quorum that the new ones had before.
    """
    *lasts, this = quorums
    newest = max(lasts, key=lambda last: last[0], default=this)
    return any(
        last[0] > this[0]
        or (last[0] == this[0] and last != this)
        or (last != newest and (last[0] == newest[0] or set(last[1]).isdisjoint(newest[1])))
        for last in lasts
    )


def _told_in(handle: str) -> dict[str, Any]:
    """What a member tells; nothing if it cannot be understood.

    Anybody may be in a quorum, and what one of them writes must not end the others.
    """
    try:
        told = json.loads(handle)
        last, awaits, connection = told.get("last"), told.get("awaits", []), told.get("connection")
        is_understood = (
            (last is None or (list(map(type, last)) == [int, list] and _are_names(last[1])))
            and isinstance(awaits, list)
            and _are_names(awaits)
            and (connection is None or list(map(type, connection)) == [int, int, int])
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_understood = False
    if not is_understood:
        return {"last": None, "awaits": [], "connection": None, "layout": None}
    layout = parse_layout(told.get("layout"))
    return {"last": last, "awaits": awaits, "connection": connection, "layout": layout}


def _are_names(listed: list[Any]) -> bool:
    return all(isinstance(name, str) for name in listed)
