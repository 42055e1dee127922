"""Whether the inner steps of a round, its fragments and the delay fit together."""

from __future__ import annotations

import math

from composer_replication.diloco.checks import check_integer, check_number


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


def check_round_seconds(
    round_seconds: object, weight_by: str, fragment_sync_delay: int, steps_between_syncs: int
) -> None:
    """Check that a round which is a time fits the other settings.

    Raises:
        ValueError: ``round_seconds`` is no such time, all groups would count as much, or a sync
            would be in flight for more than a turn.
    """
    if round_seconds != "auto":
        check_number("round_seconds", round_seconds, 1e-3, math.inf, alternative="auto")
    if weight_by == "uniform":
        raise ValueError(
            f"round_seconds={round_seconds} with weight_by=uniform: groups that train less than "
            "others would count as much, use weight_by=steps, samples or tokens"
        )
    if fragment_sync_delay >= steps_between_syncs:
        raise ValueError(
            f"round_seconds={round_seconds} with fragment_sync_delay={fragment_sync_delay} and "
            f"{steps_between_syncs} inner steps between two syncs: use a delay of at most "
            f"{steps_between_syncs - 1}, since these steps take another time in each group"
        )


def check_warmup(
    steps: int | None, outer_steps: int | None, sync_every: int, fragments: int, delay: int
) -> None:
    """Check the shorter rounds with which a run begins.

    Args:
        steps: ``warmup_sync_every``.
        outer_steps: ``warmup_outer_steps``.
        sync_every: Inner steps in the rounds after them.
        fragments: Fragments of the model.
        delay: ``fragment_sync_delay``.

    Raises:
        ValueError: One of the two settings is missing, the rounds are not shorter, or they do not
            fit the fragments and the delay.
    """
    if steps is None and outer_steps is None:
        return
    if steps is None or outer_steps is None:
        missing = "warmup_sync_every" if steps is None else "warmup_outer_steps"
        raise ValueError(
            f"warmup_sync_every={steps} and warmup_outer_steps={outer_steps}: give {missing} too, "
            "or leave both out"
        )
    check_integer("warmup_sync_every", steps, at_least=1)
    check_integer("warmup_outer_steps", outer_steps, at_least=1)
    if steps >= sync_every:
        raise ValueError(
            f"warmup_sync_every={steps} is not below sync_every={sync_every}: use at most "
            f"{sync_every - 1}"
        )
    try:
        check_schedule(steps, fragments, delay)
    except ValueError as error:
        raise ValueError(
            f"warmup_sync_every={steps}, in the place of sync_every: {error}"
        ) from None
    turns = [delay // (each // fragments) for each in (steps, sync_every)]
    if turns[0] != turns[1]:
        raise ValueError(
            f"warmup_sync_every={steps} with fragment_sync_delay={delay} would have {turns[0]} "
            f"further turns in flight and not {turns[1]}: use a warmup_sync_every closer to "
            f"sync_every={sync_every}"
        )
