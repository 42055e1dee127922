"""Which processes a launcher ends, and which it leaves alone.

Run: pytest tests/launch/test_processes.py.

Real: processes. Stood in for: the shell that outlives a launcher, by one that writes down what it
is told.
"""

import os
import subprocess
import sys
import time

import psutil
import pytest

from composer_replication.launch import processes
from composer_replication.launch.processes import Interrupts, ReplicaGroups

pytestmark = pytest.mark.integration

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def expect_order(tmp_path, monkeypatch):
    """Wait for the newest order to the watchdog: the process groups that it would end."""
    path = tmp_path / "orders"
    path.touch()  # the watchdog may not have begun when it is read
    monkeypatch.setattr(processes, "_WATCHDOG", f"exec cat > '{path}'")

    def read(expected):
        deadline = time.monotonic() + 60
        while (last := path.read_text().splitlines()[-1:]) != [expected]:
            assert time.monotonic() < deadline, f"{last}, and not {expected!r}"
            time.sleep(0.02)

    return read


def pid_of(groups, replica_id):
    return min(process.pid for process in groups.members(replica_id))


def test_the_watchdog_ends_only_groups_that_live_and_no_pid_of_a_past_life(tmp_path, expect_order):
    with ReplicaGroups(tmp_path, Interrupts()) as groups:
        groups.start(0, SLEEP, dict(os.environ))
        groups.start(1, SLEEP, dict(os.environ))
        first, second = pid_of(groups, 0), pid_of(groups, 1)
        expect_order(f"-{first} -{second}")
        groups.end(0)
        expect_order(f"-{second}")
        while groups.exit_statuses()[0] is None:
            time.sleep(0.02)
        groups.start(0, SLEEP, dict(os.environ))
        expect_order(f"-{second} -{pid_of(groups, 0)}")


def test_a_watchdog_that_was_killed_is_replaced_and_ends_no_group(tmp_path, expect_order):
    with ReplicaGroups(tmp_path, Interrupts()) as groups:
        groups.start(0, SLEEP, dict(os.environ))
        expect_order(f"-{pid_of(groups, 0)}")
        groups._watchdog.kill()
        groups._watchdog.wait()
        groups.start(1, SLEEP, dict(os.environ))
        expect_order(f"-{pid_of(groups, 0)} -{pid_of(groups, 1)}")
        assert groups.exit_statuses() == {0: None, 1: None}


def test_what_has_the_number_of_a_group_that_has_ended_is_left_alone(tmp_path, monkeypatch):
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        with ReplicaGroups(tmp_path, Interrupts()) as groups:
            groups.start(0, [sys.executable, "-c", ""], dict(os.environ))
            while groups.exit_statuses()[0] is None:
                time.sleep(0.02)
            groups.end(0)
            # As if the kernel had given the stranger the number of the group.
            monkeypatch.setattr(groups._processes[0], "pid", stranger.pid)
            assert groups.members(0) == set()
        assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        stranger.kill()
        stranger.wait()
