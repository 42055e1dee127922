"""Ranks, shards and settings of a replica group, which have to be equal in all groups."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from composer_replication.options import DuplicateIdError
from composer_replication.replica.lighthouse import LighthouseStatus
from composer_replication.replica.quorum_reports import Report
from composer_replication.settings import SettingsMismatch

log = logging.getLogger(__name__)

_Compared = tuple[int, int, int, tuple[str, ...]]
"""Ranks, shards, bytes of a row, and settings."""


class GroupLayout:
    """This group's ranks, shards and settings, and the comparison with those of its peers.

    Rank r of a group averages with rank r of the others. Their messages are as long as the rank's
    part of the model. If the peer's message has another length, gloo aborts the process without a
    Python error. A rank that its peers do not have finds nobody to connect to. So every report has
    the group's layout, and the members of a quorum compare layouts before they connect. Settings
    and model are compared between those with the newest state: one that is behind takes over that
    state first, which compares them too.

    Only rank 0 compares, because torchft tells higher ranks nothing of a group that has no such
    rank. All ranks vote on a quorum, and rank 0 votes against one with unequal layouts. If this
    group has to leave, rank 0 puts the reason into the group's store before the vote. The other
    ranks find it there after the vote.

    Args:
        num_ranks: Ranks of this group.
        rank: Which of them this process is.
        store: The group's ``TCPStore``; a single rank needs none.

    Attributes:
        rank: As given.
        num_shards: Into how many parts the ranks divide the model; 1 if each has all of it.
        row: See ``Report``.
        settings: See ``Report``.
    """

    ERRORS = {"rejected_because": SettingsMismatch, "name_taken_because": DuplicateIdError}
    """Why this group leaves, by the key in the store that has the reason."""

    def __init__(self, num_ranks: int, rank: int = 0, store: Any = None) -> None:
        self.num_ranks = num_ranks
        self.num_shards = 1
        self.row = 0
        self.settings: tuple[str, ...] = ()
        self.rank = rank
        self._store = store
        self._rejection: ValueError | None = None
        self._unequal: frozenset[str] = frozenset()

    def fits(self, reports: Mapping[str, Report], step: int = 0) -> bool:
        """Whether the members of a quorum may connect; always true on ranks other than 0.

        The layout of the first member that was in a quorum before is the run's. If all members are
        new, it is that of the first one with the newest state.

        Args:
            reports: By the lighthouse's name of the member, in the order of the quorum.
            step: This group's step.
        """
        if self.rank:
            return True
        newest = max(report.step for report in reports.values())
        name = min(reports, key=lambda n: (reports[n].previous is None, -reports[n].step))
        run = reports[name]

        def compared(each: Report | GroupLayout, step: int) -> _Compared:
            settings = each.settings if newest and step == newest else run.settings
            return each.num_ranks, each.num_shards, each.row, settings

        expected, own = compared(run, run.step), compared(self, step)
        if own != expected:
            rejection = _rejection(_describe(own, expected), name, _describe(expected, own))
            self.reject("rejected_because", rejection)
            return False
        layouts = {n: compared(each, each.step) for n, each in reports.items()}
        unequal = {name: layout for name, layout in layouts.items() if layout != own}
        # Once for each: the quorum is asked for again and again until they have left.
        for name in unequal.keys() - self._unequal:
            log.warning(
                "Not connecting to replica group %s, which has to leave: it has %s, and this group "
                "has %s",
                name.partition(":")[0],
                _describe(unequal[name], own),
                _describe(own, unequal[name]),
            )
        self._unequal = frozenset(unequal)
        return not unequal

    def reject(self, key: str, reason: str) -> None:
        """Note on rank 0, before the ranks vote, why this group has to leave.

        Args:
            key: The kind of error, a key of ``ERRORS``.
            reason: Its message.
        """
        self._rejection = self.ERRORS[key](reason)
        if self.num_ranks > 1:
            self._store.set(key, reason)

    def is_missing_rank(self, handle: str) -> bool:
        """Whether torchft made up this handle for a group that has no rank of this number."""
        return self.rank > 0 and not handle

    def check(self) -> None:
        """Check, after this group's ranks have voted against a quorum, whether it has to leave.

        Raises:
            SettingsMismatch: Rank 0 found that its ranks or shards are not the run's.
            DuplicateIdError: Rank 0 found that another group has its name.
        """
        for key, error in self.ERRORS.items():
            if self.rank and self._store.check([key]):
                self._rejection = error(self._store.get(key).decode())
        if self._rejection is not None:
            raise self._rejection


def check_ranks(status: LighthouseStatus, replica_id: str, num_ranks: int) -> None:
    """Compare this group's ranks with those of the groups in training, before they notice it.

    The members that a lighthouse lists have not proved that they belong to the run. So this group
    is rejected only if all of them have another number of ranks.

    Args:
        status: The lighthouse's status.
        replica_id: The name of this group. A member with this name is an earlier incarnation of it
            and does not count.
        num_ranks: Its ranks now.

    Raises:
        SettingsMismatch: All living groups of the last quorum have another number.
    """
    peers = [
        member
        for member in status.members
        if member.replica_id.partition(":")[0] != replica_id and member.replica_id in status.alive
    ]
    if peers and all(peer.world_size != num_ranks for peer in peers):
        expected = _ranks(peers[0].world_size)
        raise SettingsMismatch(_rejection(_ranks(num_ranks), peers[0].replica_id, expected))


def _rejection(own: str, name: str, expected: str) -> str:
    return (
        f"this replica group has {own}, and replica group {name.partition(':')[0]} of this run has "
        f"{expected}: start every group with the same number of ranks, the same kind of sharding, "
        "settings and model, and the same version of composer-replication"
    )


def _describe(layout: _Compared, other: _Compared) -> str:
    """Describe a layout, with those of its settings that another one does not have."""
    num_ranks, num_shards, row, settings = layout
    held = "the whole model on each" if num_shards == 1 else f"the model in {num_shards} shards"
    odd = [f"{row} bytes a table row"] * (row != other[2])
    odd += [each for each in settings if each not in other[3]]
    return ", ".join([f"{_ranks(num_ranks)} with {held}", *odd])


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
