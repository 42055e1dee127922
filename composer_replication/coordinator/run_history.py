"""What the groups' heartbeats have said over time: losses, syncs, settings in force, lives."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from composer_replication.diloco.outer_health import HEALTH

OF_A_SYNC = ("num_participants", "sync_seconds", *HEALTH)
"""Fields of a heartbeat that describe the group's last sync. The page draws them over time."""

MAX_POINTS = 500
"""Most points of a curve on the page."""


class RunHistory:
    """Keeps the progress that heartbeats report, in memory only.

    It never waits for the disk. Curves are thinned, so its size has a bound.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._losses: dict[str, dict[int, float]] = {}
        self._syncs: dict[int, dict[str, Any]] = {}
        self._ended: dict[str, list[dict[str, Any]]] = {}

    def add(self, replica_id: str, progress: Mapping[str, Any]) -> None:
        """Add the progress of one heartbeat.

        Args:
            replica_id: The group.
            progress: Fields of ``Heartbeat``. Those that are missing say nothing.
        """
        with self._lock:
            if progress.get("loss") is not None:
                losses = self._losses.setdefault(replica_id, {})
                losses[progress.get("batch") or 0] = progress["loss"]
                self._losses[replica_id] = _bounded(losses)
            step = progress.get("synced_step")
            if step:
                of_it = {name: progress[name] for name in OF_A_SYNC if name in progress}
                # The groups of a sync report the same about it, except how long it took each.
                self._syncs[step] = of_it | {"batch": progress.get("synced_batch")}
                self._syncs = _bounded(self._syncs)

    def end_life(self, replica_id: str, life: Mapping[str, Any]) -> None:
        """Add the life of an incarnation of a group that another one follows."""
        with self._lock:
            self._ended.setdefault(replica_id, []).append(dict(life))

    def lives(self, replica_id: str) -> list[dict[str, Any]]:
        """The lives of a group before its present one, oldest first."""
        with self._lock:
            return list(self._ended.get(replica_id, ()))

    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """The losses of each group, as rows of batch and loss, at most ``MAX_POINTS`` of them.

        They are by batch, since a group that was restarted counts inner steps from 0.
        """
        with self._lock:
            copies = {id: list(losses.items()) for id, losses in self._losses.items()}
        return {id: thinned(points) for id, points in copies.items()}

    def syncs(self) -> list[dict[str, Any]]:
        """The syncs that heartbeats have reported, by outer step, at most ``MAX_POINTS`` of them.

        Where groups sync more often than they send heartbeats, most syncs are missing.
        """
        with self._lock:
            copies = list(self._syncs.items())
        return [{"outer_step": step, **sync} for step, sync in thinned(copies)]


def thinned(points: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Sort points, and select at most ``MAX_POINTS`` at even distances, with the newest one."""
    points.sort(key=lambda point: point[0])
    if not points:
        return []
    every = 1 + (len(points) - 1) // MAX_POINTS
    return points[(len(points) - 1) % every :: every]


def _bounded(points: dict[int, Any]) -> dict[int, Any]:
    return points if len(points) <= 4 * MAX_POINTS else dict(sorted(points.items())[::2])
