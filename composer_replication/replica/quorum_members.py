"""Which members a quorum waits for, which one a failed sync is blamed on, and who is left out."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Event, Thread
from typing import Any

import torch

from composer_replication.replica.lighthouse import STRAGGLER_TIMEOUT_S
from composer_replication.replica.quorum_reports import Report

log = logging.getLogger(__name__)


class MissingMembers:
    """The members of the previous quorum for which this group waits before it uses a new one.

    A lighthouse that has been restarted, or that nobody could reach for a while, gives the first
    group that asks a quorum of its own. If that group trained on alone, the run would fork. So it
    declines the quorum and asks again, until the others are in it or do not need to be waited for.

    Args:
        read_alive: Reads the names of the members that have sent the lighthouse a heartbeat lately;
            empty if the lighthouse does not answer.

    Attributes:
        names: The lighthouse's names of the members waited for.
        deadline: When the wait for them ends, by ``time.monotonic``. None: ``STRAGGLER_TIMEOUT_S``
            after ``wait`` was first called for this quorum.
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
        """Those waited for whom the lighthouse's page has shown as alive."""

    def add_all(self, members: Iterable[str]) -> None:
        """Wait for all these members: the lighthouse has been restarted and knows none of them."""
        self.names = self.names.union(members)
        self._seen = frozenset()

    def add_living(self, members: frozenset[str]) -> None:
        """Wait for those of these members that the lighthouse's page shows as alive.

        The wait has one deadline: a member that stays alive and never asks for a quorum is waited
        for once, and not again in every quorum that it is missing in (``has_waited``).
        """
        living = members & self.read_alive()
        if living:
            log.warning("Asking for a quorum again: %s alive, and missing", group_names(living))
            self.deadline = self.deadline or time.monotonic() + self.WAIT_FOR_LIVING_S
            self.names, self._seen = self.names | living, self._seen | living

    @property
    def has_waited(self) -> bool:
        """Whether this group has waited for members that are alive until its deadline."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def update(self, reported: Iterable[Collection[str]], present: Iterable[str]) -> None:
        """Also wait for those whom other members wait for, and no longer for those in the quorum.

        Args:
            reported: Whom each member of the quorum waits for. If members disagreed about that,
                one would use the quorum and wait in it for another that has declined it.
            present: The members of the quorum.
        """
        self.names = self.names.union(*reported).difference(present)
        self._seen &= self.names

    def wait(self, began: float) -> None:
        """Give the lighthouse a moment to hear of the missing members, then give up on the dead.

        Args:
            began: When this group first asked for the quorum, by ``time.monotonic``.
        """
        since = time.monotonic()
        # Members that are alive need a moment to ask too. Without this pause the group would ask
        # again at once, and a lighthouse that has all members it knows of answers at once.
        time.sleep(self.POLL_S)
        while not self.names <= (alive := self.read_alive()):
            self._seen |= self.names & alive
            has_stopped = bool(alive) and self.names - alive <= self._seen
            limit_s = self.GONE_WITHIN_S if has_stopped else self.HEARTBEAT_WITHIN_S
            if time.monotonic() > since + limit_s:
                if alive:
                    self._drop(self.names - alive, "has not heard of")
                else:  # The lighthouse is away again, or its page cannot be read from here.
                    self._drop_stragglers(began)
                return
            time.sleep(self.POLL_S)
        self._drop_stragglers(began)

    def _drop_stragglers(self, began: float) -> None:
        """Give up on members that are alive and have not asked for a quorum for too long."""
        now = time.monotonic()
        is_past_deadline = self.deadline is not None and now > self.deadline
        if now - began > STRAGGLER_TIMEOUT_S or is_past_deadline:
            self._drop(self.names, "was not asked for a quorum by")

    def _drop(self, names: frozenset[str], reason: str) -> None:
        if names:
            groups = group_names(names)
            log.warning("Going on without those that the lighthouse %s: %s", reason, groups)
            self.names = self.names - names


def group_names(members: Iterable[str]) -> str:
    """The replica ids of members, for a message. The lighthouse's names also have a uuid."""
    return ", ".join(sorted(member.partition(":")[0] for member in members))


class SyncFaults:
    """What went wrong in this group's last sync, and whose fault that was.

    A group reports in each quorum which members it could not reach, and whether it failed by an
    error of its own. All members read the same reports and blame the same member (``at_fault``).
    That member leaves when the failures have lasted ``LEAVES_AFTER_S``. The others do not count
    these failures as theirs, so they do not leave.

    Args:
        name: The lighthouse's name of this member.

    Attributes:
        unreachable: The members whose address did not answer this one since the last quorum.
        has_failed: Whether the last sync failed by an error of this group's own.
        blamed: Where the reason lies why the last sync failed, if it did: in ``this`` group, in
            ``another`` one (also if one has joined or left since), or None if nobody can be named.
        leave_reason: Why this group leaves if the next sync fails too. None: it stays.
    """

    LEAVES_AFTER_S = 30.0
    """For how long the member at fault tries again. An interruption of 20 s ends nobody."""

    def __init__(self, name: str) -> None:
        self.unreachable: tuple[str, ...] = ()
        self.has_failed = False
        self.blamed: str | None = None
        self.leave_reason: str | None = None
        self._name = name
        self._managers: dict[str, str] = {}
        self._at_fault_since: float | None = None

    def assign(self, reports: Mapping[str, Report]) -> None:
        """Note who is to blame for the failure of the last sync, and start with a clean record.

        The group at fault does not leave at once: the other members have it in their quorum, and
        would wait for it there. It leaves when the sync in this quorum has failed too.

        Args:
            reports: By the lighthouse's name of the member.
        """
        culprit = at_fault(reports)
        managers = {name: report.manager for name, report in reports.items()}
        # A member whose manager server has another address has been started again.
        has_changed, self._managers = managers != self._managers, managers
        self.blamed = "another" if culprit is not None or has_changed else None
        if culprit == self._name:
            self.blamed = "this"
        self.unreachable, self.has_failed, self.leave_reason = (), False, None
        now = time.monotonic()
        if self.blamed != "this":
            self._at_fault_since = None
        elif self._at_fault_since is None:
            self._at_fault_since = now
        elif now - self._at_fault_since > self.LEAVES_AFTER_S:
            self.leave_reason = (
                f"for {now - self._at_fault_since:.0f} s syncs have failed because of this replica "
                f"group: {describe_fault(self._name, reports)}. It leaves, and the others go on"
            )


def at_fault(reports: Mapping[str, Report]) -> str | None:
    """Name the member that the failure of the last sync is blamed on; None if nobody can be named.

    All members read the same reports, so all name the same member. These rules are applied in
    turn:

    1. A member that failed by an error of its own is named first.
    2. A joiner with a broken connection is named before a group in training.
    3. The member with the most broken connections is named: a group that nobody can reach has a
       broken connection with each of the others.
    4. The member that most others cannot reach is named.
    5. The member whose name sorts last is named.

    Args:
        reports: By the lighthouse's name of the member.
    """
    highest = max(report.step for report in reports.values())
    broken_links = {
        frozenset((name, other))
        for name, report in reports.items()
        for other in report.unreachable
        if other in reports
    }

    def blame(name: str) -> tuple[bool, bool, int, int, str]:
        links = sum(name in link for link in broken_links)
        accusers = sum(name in report.unreachable for report in reports.values())
        is_joiner = links > 0 and reports[name].step < highest
        return reports[name].has_failed, is_joiner, links, accusers, name

    has_failed, _, links, _, name = max(map(blame, reports))
    return name if has_failed or links else None


def describe_fault(name: str, reports: Mapping[str, Report]) -> str:
    """Say in one sentence why the member is blamed, for a message."""
    if reports[name].has_failed:
        return "it fails by an error of its own, which the log has"
    others = [(other, report) for other, report in reports.items() if other != name]
    groups = {other for other, report in others if name in report.unreachable}
    if not groups:
        return f"it cannot reach {group_names(reports[name].unreachable)}"
    return (
        f"{group_names(groups)} cannot reach it, check its hostname, its firewall and its network"
    )


def is_own_failure(error: Exception) -> bool:
    """Whether an error in a sync is this group's own, and not the effect of a peer's death.

    torch raises the errors of gloo and NCCL as plain RuntimeErrors, so their text tells.
    """
    if isinstance(error, ConnectionError | TimeoutError | torch.distributed.DistError):
        return False
    return isinstance(error, OSError | RuntimeError | MemoryError) and not any(
        backend in str(error).lower() for backend in ("gloo", "nccl")
    )


class UnreachableMembers:
    """Leaves members out of a quorum with whom connections fail, until all can be reached again.

    A member whose address does not answer another one reaches the lighthouse all the same, so it
    is in every quorum, and no member could sync. So the others use the quorum without it. It asks
    for quorums like them, trains nothing meanwhile, and is in the first one in which nobody reports
    a broken connection with it. It is then behind, and heals.

    All members read the same reports, so all leave out the same ones. The ranks of a group read the
    reports of different processes, so groups of several ranks leave nobody out: they try again
    until the connection is back, or until the member at fault leaves (``SyncFaults``).

    Args:
        find_unreachable: Takes members' handles, by the lighthouse's name of the member, and
            returns the names of those whose address does not answer. Called on a thread.
        min_replica_size: So many members stay. If too few would, nobody is left out.

    Attributes:
        names: Who is left out of the current quorum.
    """

    RECHECK_EVERY_S = 0.5

    def __init__(
        self,
        find_unreachable: Callable[[Mapping[str, Any]], tuple[str, ...]],
        min_replica_size: int,
    ) -> None:
        self._find_unreachable = find_unreachable
        self._min_replica_size = min_replica_size
        self._recheck = _Recheck({}, find_unreachable)
        self.names: frozenset[str] = frozenset()

    @property
    def reported(self) -> tuple[str, ...]:
        """The members that this one could not reach and that still do not answer."""
        return self._recheck.names

    def update(self, name: str, reports: Mapping[str, Report], handles: Mapping[str, str]) -> None:
        """Choose whom to leave out of a quorum, and try the addresses that did not answer again.

        Args:
            name: The lighthouse's name of this member.
            reports: Of all members, by the lighthouse's name of the member.
            handles: torchft's handles, by the same names.
        """
        chosen = members_to_leave_out(reports, self._min_replica_size)
        for other in sorted(chosen - self.names):
            reason = describe_fault(other, reports)
            log.warning("Syncs go on without group %s: %s", group_names([other]), reason)
        self.names = chosen
        # Broken connections between two members that stay are found again when they connect.
        broken = [
            other
            for other in reports[name].unreachable
            if other in handles and (name in chosen or other in chosen)
        ]
        self._recheck.stop()
        self._recheck = _Recheck(
            {other: json.loads(handles[other]) for other in broken}, self._find_unreachable
        )

    def stop(self) -> None:
        """End the thread that tries addresses again."""
        self._recheck.stop()


class _Recheck:
    """Tries addresses on a thread until all have answered; ``names``: those that have not yet."""

    def __init__(
        self,
        handles: Mapping[str, Any],
        find_unreachable: Callable[[Mapping[str, Any]], tuple[str, ...]],
    ) -> None:
        self.names = tuple(handles)
        self._handles, self._find_unreachable = handles, find_unreachable
        self._stopped = Event()
        if handles:
            Thread(target=self._run, daemon=True, name="diloco-recheck").start()

    def _run(self) -> None:
        while self.names:
            left = {name: self._handles[name] for name in self.names}
            self.names = self._find_unreachable(left)
            if self._stopped.wait(UnreachableMembers.RECHECK_EVERY_S):
                return

    def stop(self) -> None:
        self._stopped.set()


def members_to_leave_out(
    reports: Mapping[str, Report], min_replica_size: int = 1
) -> frozenset[str]:
    """Name the members without which all connections of a quorum work, by the reports.

    Nobody is left out if a member has failed by an error of its own, if fewer than
    ``min_replica_size`` members would stay, or none with the newest global parameters.
    """
    kept = dict(reports)
    newest = max(report.step for report in reports.values())
    if any(report.has_failed for report in reports.values()):
        return frozenset()
    while (name := at_fault(kept)) is not None:
        del kept[name]
        if len(kept) < max(1, min_replica_size):
            return frozenset()
    if all(report.step < newest for report in kept.values()):
        return frozenset()
    return frozenset(reports.keys() - kept.keys())
