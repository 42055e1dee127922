"""This group's training losses, and a warning when those of all groups say that it goes wrong."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from composer_replication.diloco.outer_health import Vitals, losses

log = logging.getLogger(__name__)

LARGEST = 1e30
"""fp32, in which losses travel, has hardly any larger numbers."""

ROUNDS = 5
"""Rounds over which losses are averaged before they are compared."""

HISTORY = 10 * ROUNDS
"""Rounds that the latest ones are compared with."""

USUAL_CHANGES = 4.0
"""By so many usual changes a loss that varies by chance alone rises about once in 30,000 rounds."""

QUIET_ROUNDS = 20
"""After a warning there is no other for so many rounds."""

Losses = tuple[float, float, float]
"""Before a sync, after it, and before the next one."""


class LossNotes:
    """This group's training losses since the last sync."""

    def __init__(self) -> None:
        self._losses: list[float] = []

    def note(self, loss: float) -> None:
        """Add the loss of an inner step. One beyond all measure counts as none."""
        self._losses.append(loss if abs(loss) < LARGEST else math.nan)

    def clear(self) -> None:
        """Begin anew, after a sync or when the inner steps have been thrown away."""
        self._losses.clear()

    def ends(self) -> tuple[float, float]:
        """The means of the first and of the last quarter, at least of one step each."""
        if not self._losses:
            return math.nan, math.nan
        count = max(1, len(self._losses) // 4)
        return fmean(self._losses[:count]), fmean(self._losses[-count:])


class LossWatch:
    """Warns when the outer loop is unstable.

    An outer step that is too long raises the loss, and the inner steps no longer make up for it. So
    of the last ``ROUNDS`` rounds two things are asked, about the mean loss of all groups:

    * The syncs raise it, and the inner steps between them lower it. Where the inner steps raise it
      too, the data has become harder or the inner learning rate is too high.
    * After the syncs it is higher than in the best ``ROUNDS`` rounds before, by ``USUAL_CHANGES``
      times the median change of the loss before a sync from one round to the next.

    Rounds with another number of groups are not compared.

    Args:
        syncs_in_round: Number of fragments.
    """

    def __init__(self, syncs_in_round: int) -> None:
        self._syncs_in_round = syncs_in_round
        self._before: float | None = None
        self._syncs: list[Losses] = []
        self._rounds: deque[Losses] = deque(maxlen=HISTORY)
        self._num_groups = self._quiet = 0

    def look(self, vitals: Sequence[Vitals], outer_step: int, outer: Mapping[str, Any]) -> None:
        """Take the losses of a sync, and warn if the latest ones are those of an unstable run.

        Args:
            vitals: What the groups of the sync said about themselves.
            outer_step: The outer step that it was.
            outer: The parameter group of the outer optimizer.
        """
        groups = sum(math.isfinite(group.loss_before) for group in vitals)
        if groups != self._num_groups:
            self._num_groups, self._before = groups, None
            self._syncs.clear()
            self._rounds.clear()
        now = losses(vitals)
        before, after, last = self._before, now["loss_after"], now["loss_before"]
        self._before = last
        if before is None or after is None or last is None:
            return
        self._syncs.append((before, after, last))
        if len(self._syncs) < self._syncs_in_round:
            return
        self._rounds.append(_means(self._syncs))
        self._syncs.clear()
        self._quiet = max(0, self._quiet - 1)
        seen = None if self._quiet else unstable(list(self._rounds))
        if seen is None:
            return
        self._quiet = QUIET_ROUNDS
        log.warning(
            "The outer loop is unstable at outer step %d: %s. The outer steps are too long: set "
            "outer_lr to about half of %g, or lower outer_momentum (%s)",
            outer_step,
            seen,
            outer["lr"],
            outer.get("momentum", "none"),
        )


def unstable(rounds: Sequence[Losses]) -> str | None:
    """Say what makes rounds those of an unstable outer loop, see ``LossWatch``; None: nothing."""
    if len(rounds) < 2 * ROUNDS:
        return None
    windows = [_means(rounds[i : i + ROUNDS]) for i in range(len(rounds) - ROUNDS + 1)]
    before, after, last = windows[-1]
    lowest = min(earlier for _, earlier, _ in windows[:-ROUNDS])
    usual = median(abs(one[2] - other[2]) for one, other in pairwise(rounds))
    if after <= max(before, last) or after - lowest <= USUAL_CHANGES * usual:
        return None
    return (
        f"in the last {ROUNDS} rounds the syncs raised the mean training loss of all groups "
        f"from {before:.4g} to {after:.4g}; the inner steps brought it down to {last:.4g}, and "
        f"after earlier syncs it was {lowest:.4g}"
    )


def _means(losses: Sequence[Losses]) -> Losses:
    before, after, last = zip(*losses, strict=True)
    return fmean(before), fmean(after), fmean(last)
