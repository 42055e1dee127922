"""How many ranks a replica group has and how they hold the model: equal in all groups of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from composer_replication.diloco.settings import SettingsMismatch
from composer_replication.replica.lighthouse import LighthouseStatus
from composer_replication.replica.quorum_reports import Report

log = logging.getLogger(__name__)


class GroupLayout:
    """This group's number of ranks and shards, and the check against those of its peers.

    Rank r of a group averages with rank r of the others, in messages as long as its part of the
    model. A message of another length at the far end aborts the process inside gloo, without a
    Python error, and a rank that its peers do not have finds nobody to connect to. So every report
    has the group's layout, and the members of a quorum compare them before they connect.

    Only rank 0 compares: torchft tells higher ranks nothing of a group that has no such rank. All
    ranks vote on a quorum, and rank 0 votes against one of unequal layouts. If it is this group
    that has to leave, rank 0 first puts the reason into the group's store, where the other ranks
    find it after the vote.

    Args:
        num_ranks: Ranks of this group.
        rank: Which of them this process is.
        store: The group's ``TCPStore``; a single rank needs none.
    """

    KEY = "why_refused"

    def __init__(self, num_ranks: int, rank: int = 0, store: Any = None) -> None:
        self.num_ranks = num_ranks
        self.num_shards = 1
        """Into how many parts the ranks divide the model; 1 if each has all of it."""
        self._rank = rank
        self._store = store
        self._refusal: str | None = None
        self._odd: frozenset[str] = frozenset()

    def fits(self, reports: Mapping[str, Report]) -> bool:
        """Whether the members of a quorum may connect; always true on ranks other than 0.

        A member that was in a quorum before is in the right. If all are new, the first one is.

        Args:
            reports: By the name of the member, in the order of the quorum.
        """
        if self._rank:
            return True
        name = min(reports, key=lambda each: reports[each].previous is None)
        right = _described(reports[name].num_ranks, reports[name].num_shards)
        own = _described(self.num_ranks, self.num_shards)
        if own != right:
            self._refusal = _refusal(own, name, right)
            if self.num_ranks > 1:
                self._store.set(self.KEY, self._refusal)
            return False
        sent = {n: _described(each.num_ranks, each.num_shards) for n, each in reports.items()}
        odd = {name: text for name, text in sent.items() if text != own}
        for name in odd.keys() - self._odd:  # the quorum is asked for again until they have left
            log.warning(
                "Not connecting to replica group %s, which has to leave: it has %s, and this group "
                "has %s",
                name.partition(":")[0],
                odd[name],
                own,
            )
        self._odd = frozenset(odd)
        return not odd

    def is_missing_rank(self, handle: str) -> bool:
        """Whether torchft gives this handle for a group that has no rank of this number."""
        return self._rank > 0 and not handle

    def check(self) -> None:
        """After a quorum that this group's ranks have voted down.

        Raises:
            SettingsMismatch: Rank 0 found that this group has to leave.
        """
        if self._rank and self._store.check([self.KEY]):
            self._refusal = self._store.get(self.KEY).decode()
        if self._refusal is not None:
            raise SettingsMismatch(self._refusal)


def check_ranks(status: LighthouseStatus, replica_id: str, num_ranks: int) -> None:
    """Compare this group's ranks with those of the groups in training, before they see it.

    The lighthouse's members have not proved that they belong to the run, so one alone of several
    does not count.

    Args:
        status: The lighthouse's.
        replica_id: Of this group, whose earlier life may have had other ranks.
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
        right = _ranks(peers[0].world_size)
        raise SettingsMismatch(_refusal(_ranks(num_ranks), peers[0].replica_id, right))


def _refusal(own: str, name: str, right: str) -> str:
    return (
        f"this replica group has {own}, and replica group {name.partition(':')[0]} of this run has "
        f"{right}: start every group with the same number of ranks and the same kind of sharding"
    )


def _described(num_ranks: int, num_shards: int) -> str:
    held = "the whole model on each" if num_shards == 1 else f"the model in {num_shards} shards"
    return f"{_ranks(num_ranks)} with {held}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
