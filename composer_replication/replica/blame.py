"""Who made the last sync fail, and what follows: who leaves, who is left out, whose error counts.

The members of a quorum call the functions below with the same reports, so all name the same member.
``diloco/retry.py`` counts a failure by ``Blame.fault``.
"""

from __future__ import annotations

import logging
import time

import torch

from composer_replication.replica.quorum import MemberReports, group_name, group_names

log = logging.getLogger(__name__)


class AtFaultError(ConnectionError):
    """Syncs have failed because of this group for too long, so it leaves and the others go on."""


class Blame:
    """Whom the failure of the last sync is blamed on, from quorum to quorum.

    The group at fault tries again for ``LEAVES_AFTER_S``. Even then it does not leave at once: the
    other members have it in their quorum, and would wait for it there. It leaves when the sync in
    this quorum has failed too. The others do not count these failures, so they stay.

    Args:
        name: The lighthouse's name of this member.
        rank: This process's rank in its group.

    Attributes:
        fault: Which group made the last sync fail: ``this`` one, ``another`` one (also if one has
            joined or left since), or None if it did not fail or nobody can be named.
    """

    LEAVES_AFTER_S = 30.0
    """For how long the member at fault tries again, in seconds. No group leaves for an interruption
    of 20 s."""

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self.fault: str | None = None
        self._leave_reason = ""
        self._since: float | None = None
        self._managers: dict[str, str] = {}

    def assign(self, reports: MemberReports) -> None:
        """Note which group made the last sync fail."""
        culprit = at_fault(reports)
        managers = {name: report.manager for name, report in reports.items()}
        gone = {*map(group_name, self._managers)}.difference(map(group_name, managers))
        if gone and self._rank == 0:
            log.warning("No longer in the quorum: replica group %s", group_names(gone))
        # A member whose manager server has another address has been started again.
        has_changed = managers != self._managers
        self._managers = managers
        self._leave_reason = ""
        if culprit != self._name:
            self._since = None
            self.fault = "another" if culprit is not None or has_changed else None
            return
        self.fault = "this"
        now = time.monotonic()
        if self._since is None:
            self._since = now
        seconds = now - self._since
        if seconds > self.LEAVES_AFTER_S:
            self._leave_reason = (
                f"for {seconds:.0f} s syncs have failed because of this replica group: "
                f"{describe_fault(self._name, reports)}. It leaves, and the others go on"
            )

    def check_may_stay(self) -> None:
        """Check that this group may go on, now that the sync has failed again.

        Raises:
            AtFaultError: Syncs have failed because of this group for too long.
        """
        if self._leave_reason:
            raise AtFaultError(self._leave_reason)


def is_own_failure(error: Exception) -> bool:
    """Whether an error in a sync is this group's own, and not the effect of a peer's death.

    torch raises the errors of gloo and NCCL as plain RuntimeErrors, so only their text tells them
    apart.
    """
    if isinstance(error, ConnectionError | TimeoutError | torch.distributed.DistError):
        return False
    return isinstance(error, OSError | RuntimeError | MemoryError) and not any(
        backend in str(error).lower() for backend in ("gloo", "nccl")
    )


def at_fault(reports: MemberReports) -> str | None:
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
        for other in reports.keys() & report.unreachable
    }

    def blame(name: str) -> tuple[bool, bool, int, int, str]:
        own = reports[name]
        links = sum(name in link for link in broken_links)
        accusers = sum(name in report.unreachable for report in reports.values())
        is_joiner = links > 0 and own.step < highest
        return own.has_failed, is_joiner, links, accusers, name

    has_failed, _, links, _, name = max(map(blame, reports))
    return name if has_failed or links else None


def describe_fault(name: str, reports: MemberReports) -> str:
    """Say in one sentence why the member is blamed, for a message."""
    if reports[name].has_failed:
        return "it fails by an error of its own, which the log has"
    groups = {other for other, report in reports.items() if name in report.unreachable} - {name}
    if not groups:
        return f"it cannot reach {group_names(reports[name].unreachable)}"
    return (
        f"{group_names(groups)} cannot reach it, check its hostname, its firewall and its network"
    )


def members_to_leave_out(reports: MemberReports, min_replica_size: int) -> frozenset[str]:
    """Name the members without which all connections of a quorum work, by the reports.

    Nobody is left out if a member has failed by an error of its own, if fewer than
    ``min_replica_size`` members would stay, or none with the newest global parameters.
    """
    if any(report.has_failed for report in reports.values()):
        return frozenset()
    kept = dict(reports)
    while (name := at_fault(kept)) is not None:
        del kept[name]
        if len(kept) < min_replica_size:
            return frozenset()
    newest = max(report.step for report in reports.values())
    if all(report.step < newest for report in kept.values()):
        return frozenset()
    return frozenset(reports.keys() - kept.keys())
