"""What is kept of a long run: losses as a curve of bounded size, and digests to compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

MAX_POINTS = 500
"""Most points of a curve."""

MAX_DIGESTS = 1000
"""Digests of a group that are kept, for comparison with those of slower groups."""


class Curve:
    """Evenly spaced points of a curve and its newest one, without those that a resume repeated.

    However long it gets, it holds at most ``MAX_POINTS``.

    Attributes:
        points: The points in their order: rows of a place and a value.
    """

    def __init__(self) -> None:
        self._every = 1
        self.points: list[tuple[int, Any]] = []

    def add(self, at: int, value: Any) -> None:
        """Add the value at a place. It replaces those of this place and of later ones."""
        points = self.points
        while points and points[-1][0] >= at:
            points.pop()
        # The newest one until now stays if it is as far from the one before as all others.
        if len(points) > 1 and points[-1][0] < points[-2][0] + self._every:
            points.pop()
        if len(points) == MAX_POINTS:
            del points[1::2]
            self._every = points[-1][0] - points[-2][0]
        points.append((at, value))


class Course:
    """The losses of a replica group, and the digests of its global parameters.

    Attributes:
        losses: By batch, since a group that was restarted counts inner steps from 0.
        digests: By outer step, of the newest ``MAX_DIGESTS`` that it has reported.
    """

    def __init__(self) -> None:
        self.losses = Curve()
        self.digests: dict[int, str] = {}

    def add_digest(self, outer_step: int, digest: str) -> None:
        """Add the digest after an outer step. What it repeats after a resume is replaced."""
        if self.digests.get(outer_step) == digest:
            return
        if self.digests and outer_step <= next(reversed(self.digests)):
            self.forget_digests(outer_step)
        self.digests[outer_step] = digest  # behind all others: they are in order
        if len(self.digests) > MAX_DIGESTS:
            del self.digests[next(iter(self.digests))]

    def forget_digests(self, first: int = 0) -> None:
        """Forget those from an outer step on: the run has resumed from before it."""
        self.digests = {step: each for step, each in self.digests.items() if step < first}


def agreement_of(courses: Mapping[str, Course]) -> dict[str, Any] | None:
    """Compare the digests of the groups' global parameters.

    Args:
        courses: The course of each group, by its id.

    Returns:
        ``outer_step`` and ``digests`` of the newest outer step of which several groups have
        reported one, and ``differing``, the outer steps at which they were not equal. None: there
        is no such step.
    """
    by_step: dict[int, dict[str, str]] = defaultdict(dict)
    for replica_id, course in courses.items():
        for step, digest in course.digests.items():
            by_step[step][replica_id] = digest
    several = sorted(step for step, digests in by_step.items() if len(digests) > 1)
    if not several:
        return None
    newest = several[-1]
    differing = [step for step in several if len(set(by_step[step].values())) > 1]
    return {"outer_step": newest, "digests": by_step[newest], "differing": differing[-20:]}
