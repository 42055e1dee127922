"""How many ranks a replica group has and how they hold the model: equal in all groups of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from composer_replication.diloco.settings import SettingsMismatch
from composer_replication.lighthouse import LighthouseStatus

log = logging.getLogger(__name__)


class GroupLayout:
    """This group's number of ranks and shards, and the check against those of its peers.

    Rank r of a group averages with rank r of the others, in messages as long as its part of the
    model. A message of another length at the far end aborts the process inside gloo, without a
    Python error, and a rank that its peers do not have finds nobody to connect to. So a group sends
    its layout with its request for a quorum, and the members compare before they connect.

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

    def told(self) -> list[int]:
        """What the peers compare, as JSON gives it back."""
        return [self.num_ranks, self.num_shards]

    def fits(self, names: Sequence[str], told: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the members of a quorum may connect; always true on ranks other than 0.

        A member that was in a quorum before is in the right. If all are new, the first one is.

        Args:
            names: The members.
            told: What each sent: ``layout``, and its ``last`` quorum, None for a new member.
        """
        if self._rank:
            return True
        sent = [
            (name.partition(":")[0], each["layout"], each["last"] is None)
            for name, each in zip(names, told, strict=True)
            if each["layout"] is not None
        ]
        name, right, _ = min(sent, key=lambda member: member[2], default=("", self.told(), False))
        if self.told() != right:
            self._refusal = refusal(self.told(), name, right)
            if self.num_ranks > 1:
                self._store.set(self.KEY, self._refusal)
            return False
        odd = [f"{name} has {_described(layout)}" for name, layout, _ in sent if layout != right]
        if odd:
            log.warning(
                "Not connecting to a replica group that must leave this run: %s, and this group "
                "has %s",
                "; ".join(odd),
                _described(right),
            )
        return not odd

    def check(self) -> None:
        """After a quorum that this group's ranks have voted down.

        Raises:
            SettingsMismatch: Rank 0 found that this group has to leave.
        """
        if self._rank and self._store.check([self.KEY]):
            self._refusal = self._store.get(self.KEY).decode()
        if self._refusal is not None:
            raise SettingsMismatch(self._refusal)


def parse_layout(sent: Any) -> list[int] | None:
    """A layout that a peer has sent, or None if it is not one."""
    is_one = isinstance(sent, list) and list(map(type, sent)) == [int, int] and min(sent) > 0
    return sent if is_one else None


def refusal(own: Sequence[int], name: str, right: Sequence[int]) -> str:
    """One line that says which two layouts differ, and the fix."""
    return _refusal(_described(own), name, _described(right))


def check_ranks(status: LighthouseStatus, replica_id: str, num_ranks: int) -> None:
    """Compare this group's ranks with those of the groups in training, before they see it.

    Args:
        status: The lighthouse's.
        replica_id: Of this group, whose earlier life may have had other ranks.
        num_ranks: Its ranks now.

    Raises:
        SettingsMismatch: A living group of the last quorum has another number.
    """
    for member in status.members:
        name = member.replica_id.partition(":")[0]
        is_peer = name != replica_id and member.replica_id in status.alive
        if is_peer and member.world_size != num_ranks:
            raise SettingsMismatch(_refusal(_ranks(num_ranks), name, _ranks(member.world_size)))


def _refusal(own: str, name: str, right: str) -> str:
    return (
        f"this replica group has {own}, and replica group {name!r} of this run has {right}: start "
        "every group with the same number of ranks and the same kind of sharding"
    )


def _described(layout: Sequence[int]) -> str:
    num_ranks, num_shards = layout
    held = "the whole model on each" if num_shards == 1 else f"the model in {num_shards} shards"
    return f"{_ranks(num_ranks)} with {held}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
