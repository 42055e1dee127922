"""What the members of a quorum report to each other, and what follows from it.

Reports travel in the handles that torchft passes around. The members of a quorum call the functions
below with the same reports, so all come to the same conclusion: who leaves, and who is waited for.
Who is blamed is in ``blame.py``. ``QuorumMember`` acts on both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, get_type_hints

from composer_replication.replica.lighthouse import LighthouseStatus
from composer_replication.replica.peer_client import converted, is_proven, proof
from composer_replication.settings import compare_fingerprints, compare_groups


class PreviousQuorum(NamedTuple):
    """A quorum as its members remember it.

    Attributes:
        quorum_id: The id that the lighthouse gave it.
        members: The lighthouse's names of all members, in the lighthouse's order.
    """

    quorum_id: int
    members: tuple[str, ...]


class QuorumConnection(NamedTuple):
    """The process group that the members of a quorum have built. Equal on all members.

    Attributes:
        quorum_id: The id of the quorum for which it was built.
        num_members: How many members it connects.
        number: A number that no other connection has, see ``ReplicaManager._reconfigure_pg``.
    """

    quorum_id: int
    num_members: int
    number: int


@dataclass
class MemberReport:
    """What one member of a quorum reports to the others, in the handle that torchft passes around.

    Attributes:
        step: Its manager's step when it asked for the quorum.
        manager: Address of its manager server, which a joiner asks where to fetch the state.
        board: Address of its notice board.
        previous: The quorum that it had before; None if this is its first.
        left_out: The members of that quorum that it was used without, such as strangers.
        missing: The members that it waits for, see ``MissingMembers``.
        has_waited: Whether it has waited for missing members until its deadline.
        connection: The process group that it is part of, if it is part of one.
        unreachable: The members of its previous quorum whose address did not answer it.
        has_failed: Whether its last sync failed by an error of its own, and not by a peer's.
        gathers: Whether it asks that the messages of this sync are gathered, and not summed.
        saves_to: The folders in object stores to which its group saves.
        data: Digests of the datasets that its group divides by ``replica_shard``.
        settings: All that has to be equal in all groups: the settings, the model, ranks and shards.
    """

    step: int = 0
    manager: str = ""
    board: str = ""
    previous: PreviousQuorum | None = None
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    has_waited: bool = False
    connection: QuorumConnection | None = None
    unreachable: tuple[str, ...] = ()
    has_failed: bool = False
    gathers: bool = False
    saves_to: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    # Not dict[str, Any]: ``converted`` checks JSON by the annotation.
    settings: dict = field(default_factory=dict)


_KINDS = get_type_hints(MemberReport)


def write_handle(handle: str, report: MemberReport, name: str, token: str) -> str:
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


def read_handle(handle: str, name: str, tokens: Sequence[str]) -> MemberReport | None:
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
        return MemberReport(
            **{name: converted(content[name], kind) for name, kind in _KINDS.items()}
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


MemberReports = Mapping[str, MemberReport]
"""By the lighthouse's name of the member, in the order of the quorum."""


def group_name(member: str) -> str:
    """The replica id in the lighthouse's name of a member, which also has a uuid."""
    return member.partition(":")[0]


def group_names(members: Iterable[str]) -> str:
    """The replica ids of members, for a message."""
    return ", ".join(sorted(map(group_name, members)))


def _first_comers(reports: MemberReports) -> list[str]:
    """All members: first those that were in a quorum before, then by name. Equal on all members."""
    return sorted(reports, key=lambda name: (reports[name].previous is None, name))


# ---- who leaves ------------------------------------------------------------------------------


def other_settings(reports: MemberReports, own_name: str) -> dict[str, str]:
    """Name the members that have to leave because their settings, model or ranks are not the run's.

    Those of the first member that was in a quorum before are the run's. If all members are new, it
    is the first one with the newest state.

    Rank r of a group averages with rank r of the others, and their messages are as long as the
    rank's part of the model. If a peer's message has another length, gloo aborts the process
    without a Python error. So this check comes before any connection.

    Args:
        reports: Of all members.
        own_name: The name of this member.

    Returns:
        What to log, by the member's name.

    Raises:
        SettingsMismatch: This member is one of them.
    """

    run = min(reports, key=lambda name: (reports[name].previous is None, -reports[name].step))
    settings = {name: report.settings for name, report in reports.items()}
    return compare_groups(settings, own_name, run)


def shared_folders(reports: MemberReports) -> dict[str, str]:
    """Name the members that save to a folder in which another one saved before them.

    As with ``second_holders``, the member that was in a quorum before is the first. An earlier
    process of the same group is no other one.

    Args:
        reports: Of all members.

    Returns:
        What is wrong and what to do, by the member's name.
    """
    holders: dict[str, str] = {}
    found = {}
    for name in _first_comers(reports):
        group = group_name(name)
        for folder in reports[name].saves_to:
            holder = holders.setdefault(folder.rstrip("/"), group)
            if holder != group:
                found[name] = (
                    f"replica groups {holder} and {group} both save to {folder}, and would "
                    "overwrite each other's checkpoints: give each a folder of its own, such as "
                    "one with its REPLICA_GROUP_ID in it"
                )
    return found


def check_ranks(status: LighthouseStatus, replica_id: str, num_ranks: int) -> None:
    """Compare this group's ranks with those of the groups in training, before they notice it.

    The members that a lighthouse lists may be strangers. So this group leaves only if all of them
    have another number of ranks.

    Args:
        status: The lighthouse's status.
        replica_id: The name of this group. A member with this name is an earlier process of it and
            does not count.
        num_ranks: Its ranks now.

    Raises:
        SettingsMismatch: All living groups of the last quorum have another number.
    """
    peers = [
        member
        for member in status.members
        if member.replica_id in status.alive and group_name(member.replica_id) != replica_id
    ]
    if peers and all(peer.world_size != num_ranks for peer in peers):
        whose = f"replica group {group_name(peers[0].replica_id)}"
        compare_fingerprints({"ranks": num_ranks}, {"ranks": peers[0].world_size}, whose)


def second_holders(reports: MemberReports) -> dict[str, str]:
    """Name the members of a quorum whose replica id another member had before them, and that one.

    The member that was in a quorum before is the first holder of an id, or if none was, the one
    whose name sorts first. All members read the same reports, so they name the same ones.

    Args:
        reports: By the lighthouse's name of the member: its replica id, a colon and a uuid.
    """
    holders: dict[str, str] = {}
    found = {}
    for name in _first_comers(reports):
        first = holders.setdefault(group_name(name), name)
        if first != name:
            found[name] = first
    return found


# ---- who is waited for -------------------------------------------------------------------------


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
    if newest.quorum_id > current.quorum_id:
        return True
    for earlier in previous:
        for later in (newest, current):
            if earlier.quorum_id == later.quorum_id and earlier != later:
                return True
        if set(earlier.members).isdisjoint(newest.members):
            return True
    return False


def members_before(reports: MemberReports) -> frozenset[str]:
    """The members of these members' previous quorums, without those that were left out.

    It reads all reports, and not this member's own memory: a joiner has none, and would use the
    quorum and wait in it for those that decline it.
    """
    return frozenset(
        name
        for report in reports.values()
        if report.previous is not None
        for name in report.previous.members
        if name not in report.left_out
    )


# ---- what is left of the quorum ----------------------------------------------------------------


def restrict_quorum(quorum: Any, reports: MemberReports, group_rank: int) -> Any:
    """Reduce a quorum to those of its members whose reports are given.

    It also chooses the donors of the joiners again, among the members that stay, by the rule of
    torchft's ``manager.rs`` (``compute_quorum_results``): the members behind the highest step take
    the members at that step as donors in turn.

    Args:
        quorum: torchft's ``QuorumResult``.
        reports: Of the members that stay, in the order of the quorum. This group is one of them.
        group_rank: This process's rank in its group.

    Returns:
        An object with the attributes that ``torchft.manager.Manager`` reads of a ``QuorumResult``.
    """
    names = [*reports]
    rank = names.index(quorum.replica_ids[quorum.replica_rank])
    handles = dict(zip(quorum.replica_ids, quorum.reconfigure_handles, strict=True))
    members = [*reports.values()]
    max_step = max(report.step for report in members)
    donors = [index for index, report in enumerate(members) if report.step == max_step]
    joiners = [index for index, report in enumerate(members) if report.step != max_step]
    donor_of = {
        joiner: donors[(turn + group_rank) % len(donors)] for turn, joiner in enumerate(joiners)
    }
    source = donor_of.get(rank)
    return SimpleNamespace(
        quorum_id=quorum.quorum_id,
        replica_rank=rank,
        replica_world_size=len(names),
        recover_src_manager_address="" if source is None else members[source].manager,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[joiner for joiner, donor in donor_of.items() if donor == rank],
        max_step=max_step,
        max_replica_rank=None,  # what torchft reads of async quorums only
        max_world_size=len(donors),
        heal=source is not None,
        replica_ids=names,
        reconfigure_handles=[handles[name] for name in names],
    )
