"""Which member of a quorum a failed sync is blamed on, and when that member leaves."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from composer_replication.replica.missing_members import group_names
from composer_replication.replica.quorum_reports import Report


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
