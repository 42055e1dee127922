"""What a replica group remembers of the quorum before, and what that says about the lighthouse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class PreviousQuorum(NamedTuple):
    """A quorum as its members remember it.

    Attributes:
        quorum_id: The id that the lighthouse gave it.
        members: The lighthouse's names of all members, in the lighthouse's order.
    """

    quorum_id: int
    members: tuple[str, ...]


class Connection(NamedTuple):
    """The process group that the members of a quorum have built. Equal on all members.

    Attributes:
        quorum_id: The id of the quorum for which it was built.
        num_members: How many members it connects.
        number: A number that no other connection has, see ``ReplicaManager._reconfigure_pg``.
    """

    quorum_id: int
    num_members: int
    number: int


def parse_previous_quorum(value: Any) -> PreviousQuorum | None:
    """Read a ``PreviousQuorum`` from JSON, where it is a list or null.

    Raises:
        ValueError: The value is something else.
    """
    if value is None:
        return None
    if not isinstance(value, list) or [type(each) for each in value] != [int, list]:
        raise ValueError(f"{value!r} is not a quorum id and a list of members")
    quorum_id, members = value
    if not all(isinstance(member, str) for member in members):
        raise ValueError(f"{members!r} is not a list of names")
    return PreviousQuorum(quorum_id, tuple(members))


def parse_connection(value: Any) -> Connection | None:
    """Read a ``Connection`` from JSON, where it is a list or null.

    Raises:
        ValueError: The value is something else.
    """
    if value is None:
        return None
    if not isinstance(value, list) or [type(each) for each in value] != [int, int, int]:
        raise ValueError(f"{value!r} is not the three integers of a connection")
    return Connection(*value)


def has_lighthouse_restarted(previous: Sequence[PreviousQuorum], current: PreviousQuorum) -> bool:
    """Tell from quorum ids whether the lighthouse has been restarted since the quorum before.

    While a lighthouse lives, its ids only grow, and one id always has the same members
    (``_quorum_tick`` in torchft's ``lighthouse.rs``). A restarted lighthouse counts from 1 again.

    Groups that join a restarted lighthouse first may raise its ids above those of the groups in
    training, so that the ids alone look like growth. Then the groups in training were not in the
    quorum that the joiners had before, and that gives the restart away.

    Args:
        previous: What each member of the current quorum remembers; members without a memory are
            left out.
        current: The quorum that the lighthouse has given now.
    """
    newest = max(previous, key=lambda each: each.quorum_id, default=current)

    def contradicts(earlier: PreviousQuorum) -> bool:
        if earlier.quorum_id > current.quorum_id:
            return True
        if earlier.quorum_id == current.quorum_id and earlier != current:
            return True
        return earlier != newest and (
            earlier.quorum_id == newest.quorum_id or set(earlier.members).isdisjoint(newest.members)
        )

    return any(contradicts(each) for each in previous)
