"""For all tests of a replica group."""

import pytest

from composer_replication.group import reports, run_folder


class Clock:
    """Stands still until it is told to move."""

    now = 100.0

    def monotonic(self):
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch):
    """That of the run's folder and of the reports."""
    clock = Clock()
    for module in (reports, run_folder):
        monkeypatch.setattr(module, "time", clock)
    return clock
