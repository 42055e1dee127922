"""A curve of at most so many points, however long it gets."""

from __future__ import annotations

from typing import Any

MAX_POINTS = 500
"""Most points of a curve."""


class Curve:
    """Evenly spaced points of a curve and its newest one, without those that a resume repeated.

    However long it gets, it holds at most ``MAX_POINTS``.
    """

    def __init__(self) -> None:
        self._every = 1
        self._held: list[tuple[int, Any]] = []
        self._newest: list[tuple[int, Any]] = []

    @property
    def points(self) -> list[Any]:
        """The points in their order."""
        return [point for _, point in self._held[: MAX_POINTS - 1] + self._newest]

    def add(self, step: int, point: Any) -> None:
        """Add the point of a step or a batch. It replaces those of this and of later ones."""
        if self._newest and self._newest[0][0] < step:
            self._hold(*self._newest[0])
        while self._held and self._held[-1][0] >= step:
            self._held.pop()
        self._newest = [(step, point)]

    def _hold(self, step: int, point: Any) -> None:
        if self._held and step < self._held[-1][0] + self._every:
            return
        self._held.append((step, point))
        if len(self._held) >= MAX_POINTS:
            self._held = self._held[::2]
            self._every = self._held[-1][0] - self._held[-2][0]
