"""What the members of a quorum report to each other, in the handles that torchft passes around."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from composer_replication.replica.messages import converted, is_proven, proof

log = logging.getLogger(__name__)


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
        num_ranks: Ranks of the group.
        num_shards: Into how many parts they divide the model; see ``GroupLayout``.
        gathers: Whether it asks that the messages of this sync are gathered, and not summed.
        row: Bytes of its row in the peer table, beside those for each fragment; another build of
            this package may have others.
        settings: Each setting that has to be equal in all groups, with its value, and the model.
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
    num_ranks: int = 1
    num_shards: int = 1
    gathers: bool = False
    row: int = 0
    settings: tuple[str, ...] = ()


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


def second_holders(reports: Mapping[str, Report]) -> frozenset[str]:
    """Name the members of a quorum whose replica id another member had before them.

    The member that was in a quorum before is the first holder of an id, or if none was, the one
    whose name sorts first. All members read the same reports, so they name the same ones.

    Args:
        reports: By the lighthouse's name of the member: its replica id, a colon and a uuid.
    """
    holders: dict[str, list[str]] = {}
    for name in sorted(reports, key=lambda each: (reports[each].previous is None, each)):
        holders.setdefault(name.partition(":")[0], []).append(name)
    return frozenset(name for names in holders.values() for name in names[1:])


def restrict_quorum(
    quorum: Any, kept: Sequence[int], reports: Sequence[Report], group_rank: int
) -> Any:
    """Reduce a quorum to some of its members.

    It also assigns the donors of the joiners anew, among the members that stay, by the rule of
    torchft's ``manager.rs`` (``compute_quorum_results``): the members behind the highest step take
    the members at that step as donors in turn.

    Args:
        quorum: torchft's ``QuorumResult``.
        kept: Indices of the members that stay, in ascending order. This group is one of them.
        reports: The reports of the members that stay, in the same order.
        group_rank: This process's rank in its group.

    Returns:
        An object with the attributes that ``torchft.manager.Manager`` reads of a ``QuorumResult``.
    """
    rank = list(kept).index(quorum.replica_rank)
    max_step = max(report.step for report in reports)
    donors = [index for index, report in enumerate(reports) if report.step == max_step]
    joiners = [index for index, report in enumerate(reports) if report.step != max_step]
    donor_of = {
        joiner: donors[(turn + group_rank) % len(donors)] for turn, joiner in enumerate(joiners)
    }
    source = donor_of.get(rank)
    return SimpleNamespace(
        quorum_id=quorum.quorum_id,
        replica_rank=rank,
        replica_world_size=len(reports),
        recover_src_manager_address="" if source is None else reports[source].manager,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[joiner for joiner, donor in donor_of.items() if donor == rank],
        store_address=quorum.store_address,
        max_step=max_step,
        max_replica_rank=donors.index(rank) if rank in donors else None,
        max_world_size=len(donors),
        heal=source is not None,
        replica_ids=[quorum.replica_ids[index] for index in kept],
        reconfigure_handles=[quorum.reconfigure_handles[index] for index in kept],
    )


class Strangers:
    """Reads the reports of a quorum's members, and names those that do not prove the run's token.

    Any process that reaches the lighthouse can be a member of a quorum. The others use the quorum
    without a member that does not prove the token, and the log names it once.

    Args:
        tokens: The run's accepted secrets.
        is_missing_rank: Whether a handle stands for a rank that the member's group does not have;
            it is no stranger's.
    """

    def __init__(self, tokens: Sequence[str], is_missing_rank: Callable[[str], bool]) -> None:
        self._tokens = tokens
        self._is_missing_rank = is_missing_rank
        self._names: frozenset[str] = frozenset()

    def read_reports(self, quorum: Any) -> dict[int, Report]:
        """Read the reports of the members that prove the token, by their index in the quorum.

        Args:
            quorum: torchft's ``QuorumResult``.
        """
        reports, strangers = {}, []
        members = zip(quorum.replica_ids, quorum.reconfigure_handles, strict=True)
        for index, (name, handle) in enumerate(members):
            report = read_handle(handle, name, self._tokens)
            if report is not None:
                reports[index] = report
            elif not self._is_missing_rank(handle):
                strangers.append(name)
        for name in sorted(set(strangers) - self._names):
            log.warning(
                "Left %r out of the quorum: it does not prove that it knows this run's token. It "
                "is a stranger, COMPOSER_REPLICATION_TOKEN differs between the replica groups, or "
                "it runs another version of composer-replication",
                name,
            )
        self._names = frozenset(strangers)
        return reports
