"""The clock of the tests in this folder."""

import pytest

from composer_replication.group import reports, run_folder


class Clock:
    """In the place of the module ``time``. It stands still; a test sets ``now``."""

    now = 100.0

    def monotonic(self):
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch):
    """The clock that the run's folder and the reports read."""
    clock = Clock()
    for module in (reports, run_folder):
        monkeypatch.setattr(module, "time", clock)
    return clock
