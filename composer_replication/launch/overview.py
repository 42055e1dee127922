"""What is said about all replica groups of a run together, in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_replication.callback.run_folder import OUTER_STEP
from composer_replication.callback.words import plural
from composer_replication.launch.group_view import GroupView
from composer_replication.launch.supervision import RESTARTING


@dataclass(frozen=True)
class Comparison:
    """The groups' global parameters at the newest outer step whose digest all groups have.

    Groups that have died are left out.

    Attributes:
        outer_step: That step.
        digest: The first characters of the digest; None if the groups' digests differ.
    """

    outer_step: int
    digest: str | None


def compared(groups: Sequence[GroupView]) -> Comparison | None:
    """Compare the digests of the groups that have not died; None without two that share a step."""
    present = _present(groups)
    common = set.intersection(*(set(group.digests) for group in present)) if present else set()
    if not common or len(present) < 2:
        return None
    digests = {group.digests[max(common)] for group in present}
    return Comparison(max(common), digests.pop()[:8] if len(digests) == 1 else None)


def _present(groups: Sequence[GroupView]) -> list[GroupView]:
    """The groups whose newest values are not those of a process that has died."""
    return [group for group in groups if group.mood != "bad" and group.phase != RESTARTING]


def newest_outer_step(groups: Sequence[GroupView]) -> int:
    """The newest outer step of any group; 0 before the first."""
    return max(group.outer_step for group in groups)


def participants(groups: Sequence[GroupView]) -> int | None:
    """Groups in the newest sync of the run, as those that were in it report; None before any."""
    syncs = [group for group in groups if group.participants is not None]
    if not syncs:
        return None
    newest = max(group.sync[OUTER_STEP] for group in syncs)
    return min(group.participants or 0 for group in syncs if group.sync[OUTER_STEP] == newest)


def overview(groups: Sequence[GroupView]) -> str:
    """Say which outer step was taken by how many groups, and whether their parameters are equal."""
    return ", ".join(filter(None, (_newest_sync(groups), _agreement(groups))))


def status_line(groups: Sequence[GroupView]) -> str:
    """Say in one line how the whole run does."""
    parts = [_newest_sync(groups), _rounds(groups), _losses(groups), _time_left(groups)]
    return ", ".join(filter(None, [*parts, _agreement(groups), wrong(groups)])) or "starting"


def _newest_sync(groups: Sequence[GroupView]) -> str:
    number = participants(groups)
    if number is None:
        return ""
    return f"outer step {newest_outer_step(groups)}: {number} of {plural(len(groups), 'group')}"


def _agreement(groups: Sequence[GroupView]) -> str:
    comparison = compared(groups)
    if comparison is None:
        return ""
    is_newest = comparison.outer_step == newest_outer_step(groups)
    at = "" if is_newest else f" at step {comparison.outer_step}"
    if comparison.digest is None:
        return f"parameters DIFFERENT{at}"
    return f"parameters equal{at}: {comparison.digest}"


def wrong(groups: Sequence[GroupView]) -> str:
    """Name the groups that do not train, and what they do; empty if all do, or none has begun."""
    by_state: dict[str, list[str]] = {}
    for group in groups:
        if group.mood != "good":
            by_state.setdefault(group.state, []).append(group.name)
    return ", ".join(f"group {', '.join(ids)} {state}" for state, ids in by_state.items())


def _rounds(groups: Sequence[GroupView]) -> str:
    begun = [group for group in groups if "round" in group.status]
    if not begun:
        return ""
    furthest = max(begun, key=lambda group: group.status.get("batch") or 0)
    return f"round {furthest.round}"


def _losses(groups: Sequence[GroupView]) -> str:
    texts = [f"{loss:.3f}" for loss in sorted(_known_losses(groups))]
    if not texts:
        return ""
    return f"loss {texts[0]}" + (f" to {texts[-1]}" if texts[-1] != texts[0] else "")


def _known_losses(groups: Sequence[GroupView]) -> list[float]:
    return [group.loss for group in _present(groups) if group.loss is not None]


def _time_left(groups: Sequence[GroupView]) -> str:
    known = [group for group in groups if group.time_left != "-"]
    if not known:
        return ""
    return f"{max(known, key=lambda group: group.status['seconds_left']).time_left} left"
