"""Which processes a launcher ends, and which it leaves alone.

Run: pytest tests/launch/test_processes.py.

Real: processes.
"""

import os
import subprocess
import sys
import time

import psutil
import pytest
from waiting import wait_until

from composer_replication.launch import processes
from composer_replication.launch.processes import Interrupts, ReplicaGroups

pytestmark = pytest.mark.integration

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# As torchrun: its rank is a session of its own.
AGENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(rank.pid, flush=True)
time.sleep(60)
"""


def wait_for_end(groups, replica_id):
    while groups.exit_statuses()[replica_id] is None:
        time.sleep(0.02)


def has_ended(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def watchdogs():
    return {p.pid for p in psutil.Process().children() if p.name() == "sh"}


def test_each_group_that_lives_has_a_watchdog_and_one_that_is_killed_ends_no_group(tmp_path):
    before = watchdogs()
    with ReplicaGroups(tmp_path, Interrupts()) as groups:
        groups.start(0, SLEEP, dict(os.environ))
        [first] = watchdogs() - before
        groups.start(1, SLEEP, dict(os.environ))
        psutil.Process(first).kill()
        time.sleep(0.1)
        assert groups.exit_statuses() == {0: None, 1: None}
        groups.end(0)
        wait_for_end(groups, 0)
        assert len(watchdogs() - before) == 1 and groups.exit_statuses()[1] is None
        groups.start(0, SLEEP, dict(os.environ))
        assert len(watchdogs() - before) == 2
    assert watchdogs() == before


def test_a_group_for_which_there_is_no_watchdog_ends(tmp_path, monkeypatch):
    def start_no_watchdog(command, **options):
        if command[0] == "/bin/sh":
            raise BlockingIOError
        return start(command, **options)

    start = processes._start
    monkeypatch.setattr(processes, "_start", start_no_watchdog)
    with ReplicaGroups(tmp_path, Interrupts()) as groups:
        with pytest.raises(BlockingIOError):
            groups.start(0, SLEEP, dict(os.environ))
        wait_until(lambda: groups.exit_statuses() == {0: -9}, 10)


def test_a_rank_ends_with_its_group_though_its_agent_was_killed_before(tmp_path):
    with ReplicaGroups(tmp_path, Interrupts()) as groups:
        for replica_id in (0, 1):
            groups.start(replica_id, [sys.executable, "-c", AGENT, SLEEP[-1]], dict(os.environ))
        logs = [tmp_path / f"replica_{replica_id}" / "log.txt" for replica_id in (0, 1)]
        wait_until(lambda: all(log.read_text().endswith("\n") for log in logs))
        ranks = [psutil.Process(int(log.read_text())) for log in logs]
        ranks[0].parent().kill()
        wait_for_end(groups, 0)
        groups.end(0)
        wait_until(lambda: has_ended(ranks[0]), 10)
        assert not has_ended(ranks[1])
    assert has_ended(ranks[1])


def test_what_has_the_number_of_a_group_that_has_ended_is_left_alone(tmp_path, monkeypatch):
    stranger = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        with ReplicaGroups(tmp_path, Interrupts()) as groups:
            groups.start(0, ["sh", "-c", "echo $$"], dict(os.environ))
            wait_for_end(groups, 0)
            leader, session_of = int((tmp_path / "replica_0/log.txt").read_text()), os.getsid
            # As if the kernel had given the stranger the number of the group.
            sessions = {stranger.pid: leader}
            monkeypatch.setattr(os, "getsid", lambda pid: sessions.get(pid) or session_of(pid))
            assert [each.pid for each in groups.members(0)] == [stranger.pid]
            sessions.clear()
            groups.end(0)
            sessions[stranger.pid] = leader
            assert groups.members(0) == set()
        assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        stranger.kill()
        stranger.wait()
