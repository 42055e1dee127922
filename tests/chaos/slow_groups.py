"""Groups that run at a part of their speed: they are stopped for the rest of the time."""

from __future__ import annotations

from collections.abc import Sequence

from composer_replication.config_file import ConfigError

SLOWEST = 0.1
"""A slower group would be stopped for longer than its heartbeats may be missing."""


class Throttle:
    """Decides when a group that is slow runs, so that its share of the time is exact in the mean.

    Args:
        speed: The fraction of the time for which the group runs.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._ahead_s = 0.0
        self._runs = False
        self._asked_at: float | None = None

    def runs(self, now: float) -> bool:
        """Return whether the group shall run until the next call. The more calls, the smoother.

        Args:
            now: The time in seconds.
        """
        passed = 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = now
        self._ahead_s += passed * (self._runs - self.speed)
        self._runs = self._ahead_s <= 0
        return self._runs


def read_speeds(given: Sequence[str], replicas: int) -> dict[int, float]:
    """Read the values of ``--slow``.

    Args:
        given: A group and its speed each, such as ``2:0.5``.
        replicas: Number of groups.

    Returns:
        The speeds of the slow groups.

    Raises:
        ConfigError: A value is none of that form, there is no such group, it is named twice, or
            its speed is impossible.
    """
    speeds: dict[int, float] = {}
    for text in given:
        group, _, number = text.partition(":")
        try:
            replica_id, speed = int(group), float(number)
        except ValueError:
            raise ConfigError(
                f"--slow {text}: write a group and its speed, such as 2:0.5 for half speed"
            ) from None
        if not 0 <= replica_id < replicas:
            raise ConfigError(f"--slow {text}: there is no group {group}, use 0 to {replicas - 1}")
        if replica_id in speeds:
            raise ConfigError(f"--slow {text}: group {group} has a speed already, leave one out")
        if not SLOWEST <= speed < 1:
            raise ConfigError(f"--slow {text}: use a speed from {SLOWEST} to below 1")
        speeds[replica_id] = speed
    return speeds
