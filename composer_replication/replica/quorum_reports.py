"""What the members of a quorum report to each other, in the handles that torchft passes around."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, get_type_hints

from composer_replication.replica.messages import converted, is_proven, proof


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


@dataclass(frozen=True)
class Report:
    """What one member of a quorum tells the others, in the handle that torchft passes around.

    Attributes:
        step: Its manager's step when it asked for the quorum.
        manager: Address of its manager server, which a joiner asks where to fetch the state.
        board: Address of its notice board.
        previous: The quorum that it had before; None if this is its first.
        left_out: The members of that quorum that it was used without, such as strangers.
        missing: The members that it waits for, see ``MissingMembers``.
        has_waited: Whether it has waited as long for living members as it waits.
        connection: The process group that it is part of, if it is part of one.
        unreachable: The members of its previous quorum whose address did not answer it.
        has_failed: Whether its last sync failed by an error of its own, and not by a peer's.
        gathers: Whether it asks that the messages of this sync are gathered, and not summed.
        settings: All that has to be equal in all groups: the settings, the model, ranks and shards.
    """

    step: int = 0
    manager: str = ""
    board: str = ""
    previous: PreviousQuorum | None = None
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    has_waited: bool = False
    connection: Connection | None = None
    unreachable: tuple[str, ...] = ()
    has_failed: bool = False
    gathers: bool = False
    settings: dict = field(default_factory=dict)  # no dict[str, Any]: the annotation reads JSON


_KINDS = get_type_hints(Report)


def write_handle(handle: str, report: Report, name: str, token: str) -> str:
    """Add a report to torchft's handle, with a proof that its author knows the run's token.

    Args:
        handle: A JSON object, from ``ProcessGroup.get_reconfigure_handle``.
        report: The report to add.
        name: The lighthouse's name of this member. The proof is valid for this name alone, so that
            nobody can use a handle that another member has written.
        token: The run's secret.
    """
    content = json.loads(handle) | asdict(report)
    return json.dumps(content | {"proof": proof(token, "report", name, content)})


def read_handle(handle: str, name: str, tokens: Sequence[str]) -> Report | None:
    """Read the report in a member's handle.

    Anybody who reaches the lighthouse can be in a quorum, and what a stranger writes must not end
    the others. So a handle without a valid proof, or one that cannot be parsed, gives None.

    Args:
        handle: The handle that the member has sent.
        name: The lighthouse's name of that member.
        tokens: The run's accepted secrets.
    """
    try:
        content = json.loads(handle)
        if not is_proven(tokens, content.pop("proof"), "report", name, content):
            return None
        converted(content["store"], str)  # torchft's own part of the handle
        return Report(**{name: converted(content[name], kind) for name, kind in _KINDS.items()})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
