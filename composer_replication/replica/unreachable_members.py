"""The members that a sync goes on without, since connections with them fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Any

from composer_replication.replica.missing_members import group_names
from composer_replication.replica.quorum_reports import Report
from composer_replication.replica.sync_faults import at_fault, describe_fault

log = logging.getLogger(__name__)


class UnreachableMembers:
    """Leaves members out of a quorum with whom connections fail, until all can be reached again.

    A member whose address does not answer another one reaches the lighthouse all the same, so it
    is in every quorum, and no member could sync. So the others use the quorum without it. It asks
    for quorums like them, trains nothing meanwhile, and is in the first one in which nobody reports
    a broken connection with it. It is then behind, heals, and keeps its inner steps.

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
