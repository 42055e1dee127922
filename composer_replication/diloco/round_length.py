"""How many inner steps a replica group takes in a turn, if a round is a time and not a number."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from composer_replication.diloco.outer_health import GroupMetrics
from composer_replication.settings import AUTO, DiLoCoSettings

TURNS = 5
"""A group's pace is the median over so many turns: an evaluation in one of them has no effect.

If the last two are both slower, or both faster, the group's speed has changed, and its pace is the
one of these two that is nearer to the median.
"""


class RoundLength:
    """Chooses the inner steps of a turn, so that groups of unequal speed end it at the same time.

    Each group measures how long its inner steps take. With ``round_seconds`` a turn lasts
    ``round_seconds / num_fragments``. With ``auto`` it lasts as long as the fastest group of the
    last sync takes for ``sync_every / num_fragments`` inner steps. Each group takes as many as it
    can in that time, within ``settings.steps_allowed``. Without ``round_seconds`` all take
    ``sync_every / num_fragments``.

    Only the time between syncs counts, so the groups also ask for a quorum at the same time.

    A joiner has measured nothing in its first turn. It assumes the pace of the slowest group: the
    others then wait for it once at most. When a run begins no group has measured anything, and the
    first turn is as short as ``steps_allowed`` permits.

    Args:
        settings: The run's settings.

    Attributes:
        step_s: Seconds that an inner step of this group takes; NaN before the first measurement.
    """

    def __init__(self, settings: DiLoCoSettings) -> None:
        self._measured: deque[float] = deque(maxlen=TURNS)
        self._settings = settings
        self._steps = settings.steps_allowed(1).start
        self.step_s = math.nan

    def measure(self, step_s: float) -> None:
        """Add a turn's seconds for an inner step, the same number on every rank of the group."""
        if step_s <= 0.0:  # the clock did not see it: no pace, and no number to divide by
            return
        self._measured.append(step_s)
        last_two = list(self._measured)[-2:]
        self.step_s = median([median(self._measured), *last_two])

    def choose(self, metrics: Sequence[GroupMetrics]) -> None:
        """Choose the inner steps of the next turn.

        Args:
            metrics: The metrics of the groups in the last sync.
        """
        settings = self._settings
        paces = [group.step_s for group in metrics if group.step_s > 0] or [math.nan]
        if settings.round_seconds == AUTO:
            turn_s = min(paces) * settings.steps_between_syncs()
        else:
            seconds = float(settings.round_seconds or math.nan)
            turn_s = seconds / settings.fragment_count
        own_pace = self.step_s if self._measured else max(paces)
        steps = turn_s / own_pace
        if math.isfinite(steps):
            self._steps = round(steps)

    def steps_before(self, outer_step: int) -> int:
        """The inner steps that the group takes between two syncs, before this outer step.

        Without ``round_seconds`` the settings give the number. With it, they bound the number that
        was chosen.
        """
        allowed = self._settings.steps_allowed(outer_step)
        return max(allowed.start, min(allowed.stop - 1, self._steps))

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs to continue with the same turn."""
        return {"steps": self._steps, "step_seconds": [*self._measured]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of inner steps and the measured pace that ``state_dict`` returned."""
        self._steps = state["steps"]
        self._measured.clear()
        for step_s in state["step_seconds"]:
            self.measure(step_s)
