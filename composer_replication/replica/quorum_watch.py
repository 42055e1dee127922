"""Checks every quorum that the lighthouse gives, so that no group trains on in a wrong one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from composer_replication.replica.group_layout import GroupLayout
from composer_replication.replica.lighthouse import CONNECT_TIMEOUT_S
from composer_replication.replica.peer_client import Notices
from composer_replication.replica.quorum_members import (
    MissingMembers,
    SyncFaults,
    UnreachableMembers,
)
from composer_replication.replica.quorum_reports import (
    Connection,
    PreviousQuorum,
    Report,
    Strangers,
    has_lighthouse_restarted,
    restrict_quorum,
    second_holders,
    write_handle,
)

log = logging.getLogger(__name__)


class QuorumFailed(ConnectionError):
    """The lighthouse, or the group's own manager server, gave no quorum."""


class QuorumDeclined(Exception):
    """The members of this quorum do not use it, since it may lack groups that are alive.

    All members of the quorum come to this conclusion. Each asks for a quorum again.
    """


class AtFaultError(ConnectionError):
    """Syncs have failed because of this group for too long, so it leaves and the others go on."""


class QuorumWatch:
    """Stands between torchft's Manager and its ManagerClient, and checks every quorum.

    Each member adds a ``Report`` to the handle that torchft passes around (``manager.py``,
    ``reconfigure_handle``). All members read the same reports, so all come to the same conclusion:

    | what this member sees in a quorum | what it does |
    |---|---|
    | a report without a proof of the run's token: a stranger that reaches the lighthouse | it uses
      the quorum without that member (``restrict_quorum``) |
    | quorum ids that a single lighthouse cannot have given: it has been restarted | it declines,
      and waits for all members of the previous quorum (``MissingMembers``) |
    | a member of the quorum that any of them had before is not in it, and is alive by the
      lighthouse's page: the lighthouse stood still, nobody reached it for a while, or its join
      timeout began when a joiner asked | it declines, and waits for that member, for
      ``MissingMembers.WAIT_FOR_LIVING_S`` |
    | another member waits for somebody | it declines too, and waits with it |
    | groups with another number of ranks or shards | it declines until they have left
      (``GroupLayout``) |
    | another member with the replica id of one that was there before | it uses the quorum without
      that member, which leaves if the first holder of the id is alive; if it is not, the member is
      that group started again, and asks again until its dead predecessor is out of the quorum |
    | two members cannot connect to each other | one of them declines, and the others use the quorum
      without it (``UnreachableMembers``) |
    | all members still have the connection of the previous quorum, and nobody joined or left | it
      keeps the connection |
    | none of these | it connects to the members anew |

    A restarted lighthouse is dangerous because it uses quorum ids again. torchft connects anew only
    if the id has changed. With an id that was used before, some members would keep a connection
    that others have given up, and wait in it until their timeout.

    Each rank of a group reads the reports of the same rank in the other groups, and stops waiting
    for missing members by its own clock. So the ranks of a group vote on every quorum. Without the
    vote one rank could use a quorum that another has declined: it would wait in a vote on a commit,
    and the other in a request for a quorum.

    Args:
        client: torchft's ``ManagerClient``.
        name: The lighthouse's name of this member: its replica id, a colon and a uuid.
        manager_addr: Address of this group's manager server.
        board_addr: Address of this process's notice board.
        reconnect: Called before a quorum is returned whose members have to connect anew.
        timeout: Limit of the vote of this group's ranks.
        layout: The ranks and shards of this group.
        missing: The members that this group waits for.
        unreachable: The members that quorums are used without.
        tokens: The run's accepted secrets; the first one signs reports.

    Attributes:
        members: The lighthouse's names of the members of the last quorum.
        boards: Addresses of their notice boards, by their names.
        max_step: The highest manager step among them.
        faults: What went wrong since the last quorum, and whose fault that was.
        wants_to_gather: Whether this group asks that messages are gathered, and not summed.
        gathers: Whether a member of the last quorum asks for that.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        manager_addr: str,
        board_addr: str,
        reconnect: Callable[[], None],
        timeout: timedelta,
        layout: GroupLayout,
        missing: MissingMembers,
        unreachable: UnreachableMembers,
        tokens: Sequence[str] = (),
    ) -> None:
        self._client = client
        self.name = name
        self._manager_addr = manager_addr
        self._board_addr = board_addr
        self._reconnect = reconnect
        self._timeout = timeout
        self.layout = layout
        self.missing = missing
        self.unreachable = unreachable
        self._tokens = tuple(tokens) or ("",)
        self._strangers = Strangers(self._tokens, layout.is_missing_rank)
        self.should_commit = client.should_commit
        self.members: tuple[str, ...] = ()
        self.boards: dict[str, str] = {}
        self.max_step = 0
        self.faults = SyncFaults(name)
        self.wants_to_gather = self.gathers = False
        self._previous: PreviousQuorum | None = None
        self._connection: Connection | None = None
        self._left_out: tuple[str, ...] = ()

    @property
    def is_connected(self) -> bool:
        """Whether this group is connected to the members of the last quorum."""
        return self._connection is not None

    def _quorum(self, **request: Any) -> Any:
        """Ask the lighthouse for a quorum, in the place of ``ManagerClient._quorum``.

        Raises:
            QuorumFailed: The lighthouse gave none.
            QuorumDeclined: It gave one that its members do not use.
            AtFaultError: Syncs have failed because of this group for too long.
            SettingsMismatch: This group has other ranks or shards than the run.
            DuplicateIdError: Another group of the run has this one's replica id.
            TimeoutError: Another rank of this group did not vote on the quorum.
        """
        if self.faults.leave_reason and not self.is_connected:  # the sync has failed once more
            raise AtFaultError(self.faults.leave_reason)
        handle = request["reconfigure_handle"]
        request["reconfigure_handle"] = write_handle(
            handle, self._report(request["step"]), self.name, self._tokens[0]
        )
        if self.name in self.unreachable.names:
            # The lighthouse gives a new quorum id while a member counts failed commits, and the
            # others would connect anew in every quorum. This member has no connection to renew.
            request["commit_failures"] = 0
        try:
            quorum = self._client._quorum(**request)
        except Exception as error:  # Rust's own: a RuntimeError or a TimeoutError
            raise QuorumFailed((str(error) or repr(error)).splitlines()[0]) from error
        # With strangers: the lighthouse counts them too when it decides on a new id.
        current = PreviousQuorum(quorum.quorum_id, tuple(quorum.replica_ids))
        quorum, reports = self._without_strangers(quorum, request["group_rank"])
        is_used = self._is_complete(quorum, current, reports)
        by_name = dict(zip(self.members, reports, strict=True))
        fits = self.layout.fits(by_name, request["step"])
        is_used = all([is_used, fits, self._is_first(by_name)])
        if self.layout.num_ranks > 1:
            is_used = self._vote(request["group_rank"], request["step"], is_used)
        if not is_used:
            self.layout.check()
            raise QuorumDeclined
        self.missing.deadline = None
        self.faults.assign(by_name)
        quorum, by_name = self._without_unreachable(quorum, by_name, request["group_rank"])
        self.gathers = any(report.gathers for report in by_name.values())
        self.boards = {name: report.board for name, report in by_name.items()}
        self._connect_if_needed(quorum.quorum_id, list(by_name.values()))
        return quorum

    def _report(self, step: int) -> Report:
        return Report(
            step=step,
            manager=self._manager_addr,
            board=self._board_addr,
            previous=self._previous,
            left_out=self._left_out,
            missing=tuple(sorted(self.missing.names)),
            has_waited=self.missing.has_waited,
            connection=self._connection,
            unreachable=tuple({*self.faults.unreachable, *self.unreachable.reported}),
            has_failed=self.faults.has_failed,
            num_ranks=self.layout.num_ranks,
            num_shards=self.layout.num_shards,
            gathers=self.wants_to_gather,
            row=self.layout.row,
            settings=self.layout.settings,
        )

    def _without_strangers(self, quorum: Any, group_rank: int) -> tuple[Any, list[Report]]:
        """The quorum of those members that prove the token, and their reports."""
        reports = self._strangers.read_reports(quorum)
        if quorum.replica_rank not in reports:
            raise QuorumFailed(
                f"somebody else asks the lighthouse in the name of this group, {self.name!r}"
            )
        doubles = second_holders({quorum.replica_ids[at]: each for at, each in reports.items()})
        for index, name in enumerate(quorum.replica_ids):
            if name in doubles and name != self.name:
                where = reports.pop(index).board.rpartition(":")[0]
                log.warning(
                    "Left a second replica group %r, on %s, out of the quorum: give each group a "
                    "REPLICA_GROUP_ID of its own",
                    name.partition(":")[0],
                    where,
                )
        names = enumerate(quorum.replica_ids)
        self._left_out = tuple(name for index, name in names if index not in reports)
        kept = [*reports.values()]
        if self._left_out:
            quorum = restrict_quorum(quorum, [*reports], kept, group_rank)
        return quorum, kept

    def _without_unreachable(
        self, quorum: Any, reports: Mapping[str, Report], group_rank: int
    ) -> tuple[Any, Mapping[str, Report]]:
        """The quorum of those members that can reach each other, and their reports.

        Raises:
            QuorumDeclined: This member is not one of them.
        """
        if self.layout.num_ranks > 1:  # another rank may leave out others
            return quorum, reports
        handles = dict(zip(quorum.replica_ids, quorum.reconfigure_handles, strict=True))
        self.unreachable.update(self.name, reports, handles)
        left_out = self.unreachable.names
        if not left_out:
            return quorum, reports
        self._left_out += tuple(sorted(left_out))
        if self.name in left_out:
            raise QuorumDeclined
        kept = [index for index, name in enumerate(quorum.replica_ids) if name not in left_out]
        reports = {name: reports[name] for name in reports if name not in left_out}
        quorum = restrict_quorum(quorum, kept, list(reports.values()), group_rank)
        self.members = tuple(quorum.replica_ids)
        return quorum, reports

    def _vote(self, group_rank: int, step: int, vote: bool) -> bool:
        """Whether all ranks of this group vote for the quorum."""
        try:
            return self._client.should_commit(group_rank, step, vote, timeout=self._timeout)
        except (RuntimeError, TimeoutError) as error:  # Rust's own
            # No second try: the manager server would count this vote among those of the next one.
            raise TimeoutError(
                "another rank of this group did not vote on a quorum within timeout="
                f"{self._timeout.total_seconds():g}: it has died, or hangs. End the group, and "
                f"start it again ({str(error).splitlines()[0]})"
            ) from error

    def _is_complete(self, quorum: Any, current: PreviousQuorum, reports: Sequence[Report]) -> bool:
        """Whether the quorum has all the members that it should wait for; remember the quorum."""
        present = tuple(quorum.replica_ids)
        previous = [report.previous for report in reports if report.previous is not None]
        has_restarted = has_lighthouse_restarted(previous, current)
        if has_restarted:
            log.warning(
                "The lighthouse has been restarted: quorum id %d after %s",
                current.quorum_id,
                " and ".join(sorted({str(each.quorum_id) for each in previous})),
            )
            self.missing.add_all(self.members)
        # Of all reports, not of this member's own memory: a joiner has none, and would use the
        # quorum and wait in it for those that decline it.
        elif absent := _members_before(reports) - set(present):
            # Nor of their own clocks: with quorums of two out of three each began at another time.
            if not any(report.has_waited for report in reports):
                self.missing.add_living(absent)
        self._previous, self.members, self.max_step = current, present, quorum.max_step
        self.missing.update((report.missing for report in reports), present)
        return not has_restarted and not self.missing.names

    def _connect_if_needed(self, quorum_id: int, reports: Sequence[Report]) -> None:
        own = self._connection
        is_for_this = own is not None and own[:2] == (quorum_id, len(self.members))
        if not is_for_this or any(report.connection != own for report in reports):
            self._reconnect()

    def _is_first(self, reports: Mapping[str, Report]) -> bool:
        """Whether this member is the first holder of its replica id.

        If it is not, and the first holder is alive, this group has to leave. The reports do not
        tell: a process that was killed while it asked for a quorum is still in the next one.
        """
        if self.name not in second_holders(reports):
            return True
        self._previous = None  # this member was in no quorum yet: it stays the second holder
        replica_id = self.name.partition(":")[0]
        first = next(
            report
            for name, report in reports.items()
            if name != self.name and name.partition(":")[0] == replica_id
        )
        if self.layout.rank == 0 and self._answers(first.board):
            host = first.board.rpartition(":")[0]
            self.layout.reject(
                "name_taken_because",
                f"replica_id={replica_id!r} is taken: a living replica group on {host} has it. "
                "Give each group a REPLICA_GROUP_ID (replica_id=...) of its own; the ranks of one "
                "group call torch.distributed.init_process_group before make_manager",
            )
        return False

    def _answers(self, board: str) -> bool:
        with suppress(OSError):
            Notices(board, self._tokens, CONNECT_TIMEOUT_S).read(())
            return True
        return False

    def connected(self, quorum_id: int, number: int) -> None:
        """Note that this group has connected to the members of the last quorum.

        Args:
            quorum_id: The quorum's id.
            number: The number of the connection, equal on all members.
        """
        self._connection = Connection(quorum_id, len(self.members), number)

    def disconnected(self) -> None:
        """Note that this group has no connection: the next quorum connects all members anew."""
        self._connection = None


def _members_before(reports: Sequence[Report]) -> frozenset[str]:
    """The members that the previous quorums of all these members had, but for those left out."""
    return frozenset(
        name
        for report in reports
        if report.previous is not None
        for name in report.previous.members
        if name not in report.left_out
    )
