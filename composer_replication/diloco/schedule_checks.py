"""Whether the inner steps of a round, its fragments and the delay fit together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from composer_replication.diloco.checks import check_number

if TYPE_CHECKING:
    from composer_replication.diloco.settings import DiLoCoSettings


def check_schedule(sync_every: int, num_fragments: int, fragment_sync_delay: int) -> None:
    """Check that every fragment gets its turn in a round, and its sync ends within a round.

    torchft (``torchft/local_sgd.py``, ``DiLoCo.__init__``) needs a delay below the inner steps
    between two syncs, since it has one sync in flight.

    Raises:
        ValueError: The rounds cannot be divided among the fragments, or the delay is too long.
    """
    if sync_every % num_fragments:
        below = sync_every - sync_every % num_fragments
        fits = f"{below} or {below + num_fragments}" if below else f"{num_fragments}"
        raise ValueError(
            f"sync_every={sync_every} is not divisible by num_fragments={num_fragments}: use {fits}"
        )
    if fragment_sync_delay >= sync_every:
        raise ValueError(
            f"fragment_sync_delay={fragment_sync_delay} is not below sync_every={sync_every}, so a "
            f"fragment would be sent again before its last sync ends: use at most {sync_every - 1}"
        )


def check_round_seconds(settings: DiLoCoSettings) -> None:
    """Check that a round which is a time fits the other settings.

    Raises:
        ValueError: ``round_seconds`` is no such time, all groups would count as much, or a sync
            would be in flight for more than a turn.
    """
    value, steps = settings.round_seconds, settings.steps_between_syncs
    if value is None:
        return
    if value != "auto":
        check_number("round_seconds", value, 1e-3, math.inf, alternative="auto")
    if settings.weight_by == "uniform":
        raise ValueError(
            f"round_seconds={value} with weight_by=uniform: groups that train less than others "
            "would count as much, use weight_by=steps, samples or tokens"
        )
    if settings.turns_in_flight:
        raise ValueError(
            f"round_seconds={value} with fragment_sync_delay={settings.fragment_sync_delay} and "
            f"{steps} inner steps between two syncs: use a delay of at most {steps - 1}, since "
            "these steps take another time in each group"
        )


def check_turns(before: DiLoCoSettings, after: DiLoCoSettings) -> None:
    """Check that a change in mid-run leaves as many turns in flight.

    Raises:
        ValueError: It does not; the message has the values of ``sync_every`` that do.
    """
    turns = before.turns_in_flight
    if after.turns_in_flight == turns:
        return
    count, delay = before.fragment_count, before.fragment_sync_delay
    fits = f"at least {(delay // (turns + 1) + 1) * count}"
    if turns:
        fits += f" and at most {delay // turns * count}"
    raise ValueError(
        f"sync_every={after.sync_every} with fragment_sync_delay={delay} and {count} fragments "
        f"would have {after.turns_in_flight} further turns in flight and not {turns}, which cannot "
        f"change while the run goes on: use {fits}"
    )
