"""What the members of a quorum report to each other, and whom a failed sync is blamed on."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Report:
    """What one member of a quorum reports, in the handle that torchft passes around.

    Attributes:
        step: Its manager's step when it asked for the quorum.
        manager: Address of its manager server, which a joiner asks for the state.
        board: Address of its notice board.
        last: The id and the members of the quorum it had before; None if this is its first.
        awaits: The members of that quorum which it has been missing since a lighthouse's restart.
        connection: The id, the size and the number of the connection it has, if it has one.
        unreachable: The members of its last quorum whose address did not answer it.
        has_failed: Whether its last sync failed by an error of its own, and not by a peer's.
        num_ranks: Ranks of the group.
        num_shards: Into how many parts they divide the model; see ``GroupLayout``.
    """

    step: int = 0
    manager: str = ""
    board: str = ""
    last: list[Any] | None = None
    awaits: tuple[str, ...] = ()
    connection: list[Any] | None = None
    unreachable: tuple[str, ...] = ()
    has_failed: bool = False
    num_ranks: int = 1
    num_shards: int = 1


_FIELDS = tuple(field.name for field in fields(Report))


def write_handle(handle: str, report: Report, name: str, token: str) -> str:
    """Add a report to torchft's handle, with a proof that its author knows the run's token.

    Args:
        handle: A JSON object, from ``ProcessGroup.get_reconfigure_handle``.
        report: What to report.
        name: What the lighthouse calls this member. The proof holds for this name alone, so that
            nobody can use what another member has written.
        token: The run's secret.
    """
    content = json.loads(handle) | asdict(report)
    return json.dumps(content | {"proof": _proof(content, name, token)})


def read_handle(handle: str, name: str, tokens: Sequence[str]) -> Report | None:
    """The report in a member's handle.

    Anybody may be in a quorum, and what a stranger writes must not end the others: a handle
    without a proof, or one that cannot be understood, has no report.

    Args:
        handle: What the member has sent.
        name: What the lighthouse calls that member.
        tokens: The run's accepted secrets.
    """
    try:
        content = json.loads(handle)
        proof = content.pop("proof").encode()
        if not any(
            hmac.compare_digest(proof, _proof(content, name, token).encode()) for token in tokens
        ):
            return None
        report = Report(**{field: content[field] for field in _FIELDS})
        is_sound = (
            isinstance(report.step, int)
            and isinstance(report.manager, str)
            and isinstance(report.board, str)
            and isinstance(content["store"], str)
            and (report.last is None or _types(report.last) == [int, list])
            and (report.connection is None or _types(report.connection) == [int, int, int])
            and isinstance(report.has_failed, bool)
            and isinstance(report.num_ranks, int)
            and isinstance(report.num_shards, int)
            and all(
                isinstance(each, str)
                for each in [*report.awaits, *report.unreachable, *(report.last or [0, []])[1]]
            )
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    if not is_sound:
        return None
    return replace(report, awaits=tuple(report.awaits), unreachable=tuple(report.unreachable))


def _types(values: Sequence[Any]) -> list[type]:
    return [type(value) for value in values]


def _proof(content: Mapping[str, Any], name: str, token: str) -> str:
    text = json.dumps([name, content], sort_keys=True)
    return hmac.new(token.encode(), b"quorum\0" + text.encode(), hashlib.sha256).hexdigest()


def among(quorum: Any, kept: Sequence[int], reports: Sequence[Report], group_rank: int) -> Any:
    """A quorum reduced to some of its members.

    Who heals from whom is decided anew among them, by the rule of torchft's ``manager.rs``
    (``compute_quorum_results``): those behind the highest step take turns over those at it.

    Args:
        quorum: torchft's ``QuorumResult``.
        kept: Positions of the members that stay, in ascending order. This group is one of them.
        reports: Of the members that stay, in the same order.
        group_rank: This process's rank in its group.

    Returns:
        What ``torchft.manager.Manager`` reads of a ``QuorumResult``.
    """
    rank = list(kept).index(quorum.replica_rank)
    max_step = max(report.step for report in reports)
    donors = [place for place, report in enumerate(reports) if report.step == max_step]
    behind = [place for place, report in enumerate(reports) if report.step != max_step]
    donor_of = {
        place: donors[(turn + group_rank) % len(donors)] for turn, place in enumerate(behind)
    }
    source = donor_of.get(rank)
    return SimpleNamespace(
        quorum_id=quorum.quorum_id,
        replica_rank=rank,
        replica_world_size=len(reports),
        recover_src_manager_address="" if source is None else reports[source].manager,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[place for place, donor in donor_of.items() if donor == rank],
        store_address=quorum.store_address,
        max_step=max_step,
        max_replica_rank=donors.index(rank) if rank in donors else None,
        max_world_size=len(donors),
        heal=source is not None,
        replica_ids=[quorum.replica_ids[place] for place in kept],
        reconfigure_handles=[quorum.reconfigure_handles[place] for place in kept],
    )


def at_fault(reports: Mapping[str, Report]) -> str | None:
    """Which member the failure of the last sync is blamed on; None if nobody can be named.

    All members read the same reports and name the same one. One that failed by an error of its own
    comes first. Else it is the one with the most broken connections: one group that the others
    cannot reach has a broken connection with each of them. Of two that cannot reach each other a
    joiner is named before a group in training, then the one that is not reached, then the one
    whose name sorts last.

    Args:
        reports: By the name of the member.
    """
    highest = max(report.step for report in reports.values())
    broken = {
        frozenset((name, other))
        for name, report in reports.items()
        for other in report.unreachable
        if other in reports
    }

    def blame(name: str) -> tuple[bool, bool, int, int, str]:
        links = sum(name in link for link in broken)
        accusers = sum(name in report.unreachable for report in reports.values())
        is_joiner = links > 0 and reports[name].step < highest
        return reports[name].has_failed, is_joiner, links, accusers, name

    has_failed, _, links, _, name = max(map(blame, reports))
    return name if has_failed or links else None
