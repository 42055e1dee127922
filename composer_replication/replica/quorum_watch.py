"""Whether the quorum that a lighthouse gives may be used, and by whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from composer_replication.replica.group_layout import GroupLayout
from composer_replication.replica.quorum_reports import (
    Report,
    among,
    at_fault,
    read_handle,
    write_handle,
)

log = logging.getLogger(__name__)


class QuorumFailed(ConnectionError):
    """The lighthouse, or the group's own manager server, gave no quorum."""


class QuorumDeclined(Exception):
    """The lighthouse has been restarted, and this quorum may lack groups that are alive.

    All members of the quorum decline it: ask again.
    """


class AtFaultError(ConnectionError):
    """Syncs fail because of this group, so it leaves and the others go on."""


class QuorumWatch:
    """The part of torchft's ManagerClient that a Manager calls, which checks every quorum.

    Each member adds a ``Report`` to the handle that torchft passes around (``manager.py``,
    ``reconfigure_handle``). All members read the same reports and come to the same conclusions:

    *Strangers.* Whoever reaches the lighthouse is in the quorum. A member whose report does not
    prove that it knows the run's token is left out: the others connect without it.

    *A restarted lighthouse.* Ids only grow while a lighthouse lives. One that has come back counts
    from 1 again. It gives the first group that asks a quorum of its own, since it has not heard of
    the others; it gives that again when asked again, since all members of the last quorum are
    there; and it comes to ids that were used before, under which some members may be connected and
    others not. So members decline a quorum that lacks groups which were in the last one, and keep
    a connection only if all of them have it. Each rank of a group sees the reports of the same
    rank in the others, and stops waiting for missing groups by a clock of its own: so the ranks of
    a group vote on every quorum. One that went on without another would vote on a commit, and wait
    there for one that asks for a quorum.

    *A lighthouse that stood still*, or that nobody reached for a while, takes all groups for dead,
    and gives the first one that asks a quorum of its own. Members that are missing in a quorum, and
    alive by the lighthouse's page, are waited for in the same way, for ``MISSED_FOR_S``.

    *Faults.* The reports say who could not reach whom, and who failed by an error of its own. The
    member that the failures are blamed on (``at_fault``) leaves when that has lasted
    ``LEAVES_AFTER_S``. The others do not count these failures as theirs, so they do not leave.

    Args:
        client: torchft's ``ManagerClient``.
        name: What the lighthouse calls this member: its replica id, a colon and a uuid.
        manager_addr: Address of this group's manager server.
        board_addr: Address of this process's notice board.
        reconnect: Called before a quorum whose members have to connect is returned.
        world_size: Ranks in this group.
        timeout: Limit of their vote.
        tokens: The run's accepted secrets; reports are signed with the first one.
    """

    LEAVES_AFTER_S = 30.0
    """How long the member at fault tries on: network interruptions of up to 20 s end nobody."""
    MISSED_FOR_S = 10.0
    """How long to wait for a member that is alive and missing in a quorum. One that was too slow
    for the lighthouse's join timeout is missing too, so it is no long time."""

    def __init__(
        self,
        client: Any,
        name: str,
        manager_addr: str,
        board_addr: str,
        reconnect: Callable[[], None],
        world_size: int,
        timeout: timedelta,
        tokens: Sequence[str] = (),
    ) -> None:
        self._client = client
        self.name = name
        self._manager_addr = manager_addr
        self._board_addr = board_addr
        self._reconnect = reconnect
        self._world_size = world_size
        self._timeout = timeout
        self._tokens = tuple(tokens) or ("",)
        self.should_commit = client.should_commit
        self.layout = GroupLayout(world_size)
        self.members: tuple[str, ...] = ()
        self._managers: dict[str, str] = {}
        self.boards: dict[str, str] = {}
        """Addresses of the members' notice boards, by their names."""
        self.max_step = 0
        self.awaits: frozenset[str] = frozenset()
        self.awaits_until: float | None = None
        """By ``time.monotonic``; None for the manager's own limit."""
        self.alive: Callable[[], frozenset[str]] = frozenset
        """Gives the members that the lighthouse has heard of lately, by its page."""
        self.unreachable: tuple[str, ...] = ()
        self.has_failed = False
        self.fault: str | None = None
        """Where the reason lies why the last sync failed, if it did: in ``this`` group, in
        ``another`` one (also if one has come or gone since), or None if nobody can be named."""
        self._last: list[Any] | None = None  # a list, as JSON gives it back
        self._connection: list[Any] | None = None
        self._blamed_since: float | None = None
        self._leaves_because: str | None = None
        self._strangers: frozenset[str] = frozenset()

    @property
    def is_connected(self) -> bool:
        """Whether the members of the last quorum are connected."""
        return self._connection is not None

    def _quorum(self, **request: Any) -> Any:
        """Ask for a quorum.

        Raises:
            QuorumFailed: There is none.
            QuorumDeclined: There is one that its members do not use.
            AtFaultError: Syncs have been failing because of this group, for too long.
            SettingsMismatch: This group has other ranks or shards than the run.
            TimeoutError: Another rank of this group has not voted on it.
        """
        if self._leaves_because and not self.is_connected:  # the sync has failed once more
            raise AtFaultError(self._leaves_because)
        report = Report(
            step=request["step"],
            manager=self._manager_addr,
            board=self._board_addr,
            last=self._last,
            awaits=tuple(sorted(self.awaits)),
            connection=self._connection,
            unreachable=self.unreachable,
            has_failed=self.has_failed,
            num_ranks=self.layout.num_ranks,
            num_shards=self.layout.num_shards,
        )
        handle = write_handle(request["reconfigure_handle"], report, self.name, self._tokens[0])
        request["reconfigure_handle"] = handle
        try:
            quorum = self._client._quorum(**request)
        except Exception as error:  # Rust's own: a RuntimeError or a TimeoutError
            raise QuorumFailed(str(error).splitlines()[0]) from error
        quorum_as_given = [quorum.quorum_id, list(quorum.replica_ids)]
        quorum, reports = self._without_strangers(quorum, request["group_rank"])
        before = self._managers
        is_used = self._is_usable(quorum, quorum_as_given, reports)
        is_used = self.layout.fits(dict(zip(self.members, reports, strict=True))) and is_used
        if self._world_size > 1:
            is_used = self._do_all_vote_for_it(request["group_rank"], request["step"], is_used)
        if not is_used:
            self.layout.check()
            raise QuorumDeclined
        self.awaits_until = None
        self._judge(dict(zip(quorum.replica_ids, reports, strict=True)), before)
        self.boards = {
            name: report.board for name, report in zip(self.members, reports, strict=True)
        }
        self._connect_if_needed(quorum.quorum_id, reports)
        return quorum

    def _without_strangers(self, quorum: Any, group_rank: int) -> tuple[Any, list[Report]]:
        read = [
            read_handle(handle, name, self._tokens)
            for handle, name in zip(quorum.reconfigure_handles, quorum.replica_ids, strict=True)
        ]
        kept = [place for place, report in enumerate(read) if report is not None]
        if quorum.replica_rank not in kept:
            raise QuorumFailed(
                f"somebody else asks the lighthouse in the name of this group, {self.name!r}"
            )
        reports = [report for report in read if report is not None]
        strangers = frozenset(
            name
            for name, handle, report in zip(
                quorum.replica_ids, quorum.reconfigure_handles, read, strict=True
            )
            if report is None and not self.layout.is_missing_rank(handle)
        )
        for name in sorted(strangers - self._strangers):
            log.warning(
                "Left %r out of the quorum: it does not prove that it knows this run's token. It "
                "is a stranger, or COMPOSER_REPLICATION_TOKEN differs between the replica groups",
                name,
            )
        self._strangers = strangers
        if len(kept) < len(read):
            quorum = among(quorum, kept, reports, group_rank)
        return quorum, reports

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

    def _is_usable(self, quorum: Any, this: list[Any], reports: Sequence[Report]) -> bool:
        names = tuple(quorum.replica_ids)
        lasts = [report.last for report in reports if report.last is not None]
        has_restarted = _are_of_two_lighthouses([*lasts, this])
        if has_restarted:
            log.warning(
                "The lighthouse has been restarted: quorum id %d after %s",
                this[0],
                " and ".join(sorted({str(last[0]) for last in lasts})),
            )
            self.awaits = self.awaits.union(self.members)
        elif missing := frozenset(self.members) - set(names):
            self._await_living(missing)
        self._last, self.members, self.max_step = this, names, quorum.max_step
        self.awaits = self.awaits.union(*(report.awaits for report in reports)) - set(names)
        return not has_restarted and not self.awaits

    def _await_living(self, missing: frozenset[str]) -> None:
        now = time.monotonic()
        if self.awaits_until is None or now < self.awaits_until:
            living = missing & self.alive()
            if living:
                log.warning("Asking for a quorum again: %s alive, and missing", _names(living))
                self.awaits_until = self.awaits_until or now + self.MISSED_FOR_S
                self.awaits = self.awaits | living

    def _judge(self, reports: Mapping[str, Report], before: Mapping[str, str]) -> None:
        """Find who is to blame for the failure of the last sync, if it has failed.

        A member whose manager server is another one has gone since, and has come back.

        If it is this group, and has been for ``LEAVES_AFTER_S``, then it leaves unless the sync in
        this quorum ends well.
        """
        culprit = at_fault(reports)
        self._managers = {name: report.manager for name, report in reports.items()}
        self.fault = "another" if culprit is not None or before != self._managers else None
        if culprit == self.name:
            self.fault = "this"
        self.unreachable, self.has_failed = (), False
        self._leaves_because = None
        now = time.monotonic()
        if self.fault != "this":
            self._blamed_since = None
        elif self._blamed_since is None:
            self._blamed_since = now
        elif now - self._blamed_since > self.LEAVES_AFTER_S:
            # Not at once: the others have this group in their quorum, and would wait for it there.
            self._leaves_because = (
                f"for {now - self._blamed_since:.0f} s syncs have failed because of this replica "
                f"group: {_complaint(self.name, reports)}. It leaves, and the others go on"
            )

    def _connect_if_needed(self, quorum_id: int, reports: Sequence[Report]) -> None:
        self._warn_of_twins()
        current = [quorum_id, len(self.members)]
        keeps = self._connection is not None and self._connection[:2] == current
        if not keeps or any(report.connection != self._connection for report in reports):
            self._reconnect()

    def _warn_of_twins(self) -> None:
        replica_id = self.name.partition(":")[0]
        if sum(name.partition(":")[0] == replica_id for name in self.members) > 1:
            log.warning(
                "replica_id=%r is in this quorum twice: ranks of a group whose launcher has died "
                "may be left, or two groups have been given the same one",
                replica_id,
            )

    def connected(self, quorum_id: int, unique: int) -> None:
        """The members of the last quorum are connected, under a number that they all have."""
        self._connection = [quorum_id, len(self.members), unique]

    def disconnected(self) -> None:
        self._connection = None


def _complaint(name: str, reports: Mapping[str, Report]) -> str:
    if reports[name].has_failed:
        return "it fails by an error of its own, which the log has"
    others = [(other, report) for other, report in reports.items() if other != name]
    groups = {other for other, report in others if name in report.unreachable}
    if not groups:
        return f"it cannot reach {_names(reports[name].unreachable)}"
    return f"{_names(groups)} cannot reach it, check its hostname, its firewall and its network"


def _names(members: Iterable[str]) -> str:
    return ", ".join(sorted(member.partition(":")[0] for member in members))


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
