"""This group as a member of quorums: what it reports, and what it remembers between quorums."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any

from composer_replication.options import DuplicateIdError
from composer_replication.replica.blame import Blame, describe_fault, members_to_leave_out
from composer_replication.replica.lighthouse import CONNECT_TIMEOUT_S
from composer_replication.replica.missing_members import MissingMembers
from composer_replication.replica.peer_client import PeerClient
from composer_replication.replica.quorum import (
    MemberReport,
    MemberReports,
    PreviousQuorum,
    group_name,
    has_lighthouse_restarted,
    members_before,
    other_settings,
    read_handle,
    restrict_quorum,
    second_holders,
    shared_folders,
    write_handle,
)
from composer_replication.settings import TENSORS, SettingsMismatch
from composer_replication.util.fence import fence

log = logging.getLogger(__name__)

FindUnreachable = Callable[[Mapping[str, Any]], tuple[str, ...]]
"""Takes members' handles, by the lighthouse's name of the member, and returns the names of those
whose address does not answer."""


class QuorumFailed(ConnectionError):
    """The lighthouse, or the group's own manager server, gave no quorum."""


class QuorumDeclined(Exception):
    """The members of this quorum do not use it, since it may lack groups that are alive.

    All members of the quorum come to this conclusion. Each asks for a quorum again.
    """


@dataclass(eq=False, repr=False)
class QuorumMember:
    """Decides with the other members of each quorum whether and how to use it.

    Each member adds a ``MemberReport`` to the handle that torchft passes around (``manager.py``,
    ``reconfigure_handle``). All members read the same reports, so all come to the same conclusion:

    | what this member sees in a quorum | what it does |
    |---|---|
    | a report without a proof of the run's token: a stranger that reaches the lighthouse | it uses
      the quorum without that member |
    | quorum ids that a single lighthouse cannot have given: it has been restarted | it declines,
      and waits for all members of the previous quorum (``MissingMembers``) |
    | a member of the quorum that any of them had before is not in it, and is alive by the
      lighthouse's page: the lighthouse stood still, nobody reached it for a while, or its join
      timeout began when a joiner asked | it declines, and waits for that member, for
      ``MissingMembers.WAIT_FOR_LIVING_S`` |
    | another member waits for somebody | it declines too, and waits with it |
    | groups with other settings, another model, other ranks or shards, or that save to another
      group's folder | it declines until they have left (``other_settings``, ``shared_folders``) |
    | another member with the replica id of one that was there before | it uses the quorum without
      that member, which leaves if the first holder of the id is alive; if it is not, the member is
      that group started again, and asks again until its dead predecessor is out of the quorum |
    | two members cannot connect to each other | one of them declines, and the others use the quorum
      without it (``members_to_leave_out``) |
    | all members still have the connection of the previous quorum, and nobody joined or left | it
      keeps the connection |
    | none of these | it connects to the members again |

    A member whose address does not answer another one reaches the lighthouse all the same, so it is
    in every quorum. Left out it asks for quorums like the others, trains nothing meanwhile, and is
    in the first one in which nobody reports a broken connection with it. It is then behind, and
    heals.

    Each rank of a group reads the reports of the same rank in the other groups, and stops waiting
    for missing members by its own clock. So the ranks of a group agree on every quorum. Otherwise
    one rank could use a quorum that another has declined: it would wait in a vote on a commit, and
    the other in a request for a quorum. For the same reason groups of several ranks leave out
    nobody who cannot be reached: they try again until the connection is back, or until the member
    at fault leaves.

    Args:
        name: The lighthouse's name of this member: its replica id, a colon and a uuid.
        own: What this member reports: its addresses and settings, and what it remembers. Its
            ``connection`` is None after ``use`` if all members connect again.
        tokens: The run's accepted secrets; the first one signs reports.
        missing: The members that this group waits for.
        find_unreachable: Says which members' addresses do not answer. Called on a thread too.
        min_replica_size: So many members stay when members are left out. If too few would, nobody
            is.
        rank: This process's rank in its group.
        num_ranks: How many ranks the group has.
        store: The group's ``TCPStore``; a single rank needs none.

    Attributes:
        reports: Those of the members of the last quorum.
        blame: Who made the last sync fail.
    """

    name: str
    own: MemberReport
    tokens: Sequence[str]
    missing: MissingMembers
    find_unreachable: FindUnreachable
    min_replica_size: int
    rank: int
    num_ranks: int
    store: Any

    def __post_init__(self) -> None:
        self.reports: MemberReports = {}
        self.blame = Blame(self.name, self.rank)
        self._recheck = Recheck({}, self.find_unreachable)
        self._warned: dict[str, set[str]] = {}

    # ---- what this member reports ------------------------------------------------------------

    def add_report(self, handle: str, step: int) -> str:
        """Add this member's report to torchft's handle, for a request for a quorum.

        Args:
            handle: From ``ProcessGroup.get_reconfigure_handle``.
            step: The manager's step.

        Raises:
            AtFaultError: Syncs have failed because of this group for too long.
        """
        if self.own.connection is None:  # the sync has failed again
            self.blame.check_may_stay()
        settings = dict(self.own.settings)
        if self.own.previous is not None:
            # They are long, and only needed to say why a joiner is refused.
            settings.pop(TENSORS, None)
        report = replace(
            self.own,
            step=step,
            missing=tuple(sorted(self.missing.names)),
            has_waited=self.missing.has_waited,
            unreachable=tuple({*self.own.unreachable, *self._recheck.names}),
            settings=settings,
        )
        return write_handle(handle, report, self.name, self.tokens[0])

    @property
    def is_left_out(self) -> bool:
        """Whether the others have used the last quorum without this member."""
        return self.name in self.own.left_out

    def stop(self) -> None:
        """End the thread that tries addresses again."""
        self._recheck.stop()

    # ---- what it concludes from all reports ---------------------------------------------------

    def use(self, quorum: Any, do_ranks_agree: Callable[[bool], bool]) -> Any:
        """Decide whether and how to use a quorum, as all its other members do.

        Args:
            quorum: torchft's ``QuorumResult``.
            do_ranks_agree: Takes whether this rank uses the quorum, and returns whether all ranks
                of this group do; called if there are several.

        Returns:
            The quorum, perhaps of fewer members.

        Raises:
            QuorumFailed: Somebody else has asked in the name of this group.
            QuorumDeclined: The members do not use it.
            SettingsMismatch: This group has other settings, or another model, than the run.
            DuplicateIdError: Another group of the run has this one's replica id.
        """
        handles = dict(zip(quorum.replica_ids, quorum.reconfigure_handles, strict=True))
        reports = self._without_strangers(handles)
        # With strangers: the lighthouse counts them too when it decides on a new id.
        current = PreviousQuorum(quorum.quorum_id, tuple(handles))
        # All three, whatever the first one says: each remembers what it has seen.
        is_complete = self._is_complete(reports, current)
        fits = self._fits(reports)
        is_first = self._is_first(reports)
        is_used = is_complete and fits and is_first
        if self.num_ranks > 1:
            # Otherwise one rank could use a quorum that another one has declined: it would wait in
            # a vote on a commit, and the other in a request for a quorum.
            is_used = do_ranks_agree(is_used)
            if not is_used:
                self._check_rejection(do_ranks_agree)
        if not is_used:
            raise QuorumDeclined
        self.missing.deadline = None
        self.blame.assign(reports)
        self.own.unreachable = ()  # the errors of that sync
        self.own.has_failed = False
        if self.num_ranks == 1:  # another rank might leave out others
            reports = self._without_unreachable(reports, handles)
        self.reports = reports
        if not self._are_connected(quorum.quorum_id):
            self.own.connection = None
        if len(reports) == len(handles):
            return quorum
        return restrict_quorum(quorum, reports, self.rank)

    def _are_connected(self, quorum_id: int) -> bool:
        """Whether all members have a connection that was made for this quorum and no others."""
        own = self.own.connection
        if own is None or own.quorum_id != quorum_id or own.num_members != len(self.reports):
            return False
        return all(report.connection == own for report in self.reports.values())

    def _warn(self, kind: str, warnings: Mapping[str, str]) -> None:
        """Log a warning for each member, once for as long as there is one in each quorum."""
        before = self._warned.get(kind, set())
        for name in sorted(warnings.keys() - before):
            log.warning("%s", warnings[name])
        self._warned[kind] = set(warnings)

    def _without_strangers(self, handles: Mapping[str, str]) -> dict[str, MemberReport]:
        """The reports of those members that prove the token, one for each replica id.

        Any process that reaches the lighthouse can be a member of a quorum.
        """
        reports: dict[str, MemberReport] = {}
        strangers = {}
        for name, handle in handles.items():
            report = read_handle(handle, name, self.tokens)
            if report is not None:
                reports[name] = report
            elif handle or self.rank == 0:
                # torchft gives a group without a rank of this number an empty handle.
                strangers[name] = (
                    f"Left {name!r} out of the quorum: it does not prove that it knows this run's "
                    "token. It is a stranger, COMPOSER_REPLICATION_TOKEN differs between the "
                    "replica groups, or it runs another version of composer-replication"
                )
        if self.name not in reports:
            raise QuorumFailed(
                f"somebody else asks the lighthouse in the name of this group, {self.name!r}"
            )
        self._warn("stranger", strangers)
        doubles = {}
        for name in second_holders(reports).keys() - {self.name}:
            host, _, _ = reports.pop(name).board.rpartition(":")
            doubles[name] = (
                f"Left a second replica group {group_name(name)!r}, on {host}, out of the quorum: "
                "give each group a REPLICA_GROUP_ID of its own"
            )
        self._warn("double", doubles)
        self.own.left_out = tuple(name for name in handles if name not in reports)
        return reports

    def _is_complete(self, reports: MemberReports, current: PreviousQuorum) -> bool:
        """Whether the quorum has all the members that it should wait for; remember the quorum."""
        previous = [each.previous for each in reports.values() if each.previous is not None]
        has_restarted = has_lighthouse_restarted(previous, current)
        absent = members_before(reports) - reports.keys()
        # One member's wait counts for all: with quorums of two out of three, each began at another
        # time.
        has_waited = any(report.has_waited for report in reports.values())
        if has_restarted:
            ids = sorted({str(each.quorum_id) for each in previous})
            log.warning(
                "The lighthouse has been restarted: quorum id %d after %s",
                current.quorum_id,
                " and ".join(ids),
            )
            self.missing.add_all(self.reports)
        elif absent and not has_waited:
            self.missing.add_living(absent)
        self.own.previous = current
        self.reports = reports
        self.missing.update((report.missing for report in reports.values()), reports)
        return not has_restarted and not self.missing.names

    def _fits(self, reports: MemberReports) -> bool:
        """Whether all members have the run's settings, and folders of their own.

        It is always true on ranks other than 0.

        Only rank 0 compares, because torchft gives higher ranks no report of a group that has no
        such rank. Its answer decides for all ranks.
        """
        if self.rank != 0:
            return True
        try:
            others = other_settings(reports, self.name)
        except SettingsMismatch as error:
            self._reject(error)
            return False
        shared = shared_folders(reports)
        if self.name in shared:
            self._reject(SettingsMismatch(shared[self.name]))
        self._warn("settings", others)
        self._warn("folder", shared)
        return not (others or shared)

    def _is_first(self, reports: MemberReports) -> bool:
        """Whether this member is the first holder of its replica id.

        If it is not, and the first holder is alive, this group has to leave. The reports do not
        tell: a process that was killed while it asked for a quorum is still in the next one.
        """
        first = second_holders(reports).get(self.name)
        if first is None:
            return True
        self.own.previous = None  # this member was in no quorum yet: it stays the second holder
        if self.rank != 0:
            return False
        board = reports[first].board
        with suppress(OSError):  # it has died, and will soon be out of the quorum
            PeerClient(self.tokens, "", CONNECT_TIMEOUT_S).ask(board, "read")
            host, _, _ = board.rpartition(":")
            self._reject(
                DuplicateIdError(
                    f"replica_id={group_name(first)!r} is taken: a living replica group on {host} "
                    "has it. Give each group a REPLICA_GROUP_ID (replica_id=...) of its own; the "
                    "ranks of one group call torch.distributed.init_process_group before "
                    "make_manager"
                )
            )
        return False

    def _reject(self, error: ValueError) -> None:
        """Say on rank 0 why this group has to leave: at once, or to all ranks before they agree.

        The class name of the error is the key of the reason in the store.
        """
        if self.num_ranks == 1:
            raise error
        self.store.set(type(error).__name__, str(error))

    def _check_rejection(self, do_ranks_agree: Callable[[bool], bool]) -> None:
        """Raise, on every rank, the reason that rank 0 has found why this group has to leave."""
        for kind in (SettingsMismatch, DuplicateIdError):
            if self.store.check([kind.__name__]):
                reason = self.store.get(kind.__name__).decode()
                # The store ends with rank 0, which therefore waits until all ranks have read it.
                with suppress(TimeoutError):
                    do_ranks_agree(False)
                raise kind(reason)

    def _without_unreachable(
        self,
        reports: dict[str, MemberReport],
        handles: Mapping[str, str],
    ) -> dict[str, MemberReport]:
        """The reports of those members that can reach each other.

        Raises:
            QuorumDeclined: This member is not one of them.
        """
        left_out = members_to_leave_out(reports, self.min_replica_size)
        warnings = {
            name: f"Syncs go on without group {group_name(name)}: {describe_fault(name, reports)}"
            for name in left_out
        }
        self._warn("unreachable", warnings)
        # Two members that stay find a broken connection again when they connect.
        tried = reports if self.name in left_out else left_out
        broken = set(tried).intersection(reports[self.name].unreachable)
        self._recheck.stop()
        addresses = {name: json.loads(handles[name]) for name in broken}
        self._recheck = Recheck(addresses, self.find_unreachable)
        self.own.left_out += tuple(sorted(left_out))
        if self.is_left_out:
            raise QuorumDeclined
        return {name: report for name, report in reports.items() if name not in left_out}


class Recheck:
    """Tries addresses on a thread until all have answered; ``names`` has those that have not."""

    EVERY_S = 0.5

    def __init__(self, handles: Mapping[str, Any], find_unreachable: FindUnreachable) -> None:
        self.names = tuple(handles)
        self._handles = handles
        self._find_unreachable = find_unreachable
        self._stopped = Event()
        if handles:
            Thread(target=self._run, daemon=True, name="diloco-recheck").start()

    def _run(self) -> None:
        while self.names:
            left = {name: self._handles[name] for name in self.names}
            with fence("which groups answer again"):  # after an error those left count as silent
                self.names = self._find_unreachable(left)
            if self._stopped.wait(self.EVERY_S):
                return

    def stop(self) -> None:
        """End the thread, at most ``EVERY_S`` seconds later."""
        self._stopped.set()
