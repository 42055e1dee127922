"""A process that fails when it is ordered to. Run: pytest tests/launch/test_fault_injection.py

Real: processes, signals, order files, and in the test of the network the lighthouse, managers and
gloo.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from composer_replication.launch.fault_injection import (
    NOWHERE,
    Faults,
    Order,
    give_order,
    install,
    obeyed_at,
)
from composer_replication.replica import factory as replica
from composer_replication.replica.lighthouse import start_lighthouse

HANGS = """
import pathlib, sys, threading, time
from composer_replication.launch.fault_injection import Faults

def say(word):
    while True:
        sys.stdout.write(word + "\\n")
        sys.stdout.flush()
        time.sleep(0.1)

Faults(pathlib.Path(sys.argv[1])).watch()
threading.Thread(target=say, args=["beat"], daemon=True).start()
say("step")
"""


def wait_until(condition, within_s=90.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_only_the_main_thread_of_a_process_that_hangs_stands_still(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, tmp_path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert {process.stdout.readline() for _ in range(6)} == {"beat\n", "step\n"}
        give_order(tmp_path, Order(1, "hang"))
        wait_until(lambda: obeyed_at(tmp_path, 1) is not None)
        time.sleep(0.2)
        lines = [process.stdout.readline() for _ in range(60)]
        assert set(lines[-10:]) == {"beat\n"} and process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_an_order_of_its_last_life_is_not_for_a_process(tmp_path):
    order = Order(1, "unreachable")
    give_order(tmp_path, order)
    faults = Faults(tmp_path)
    assert not faults.begin() and faults.current("unreachable") is None


@pytest.mark.alone
def test_an_order_holds_from_the_next_sync_on_for_so_long(tmp_path):
    faults = Faults(tmp_path)
    faults.watch()
    order = Order(4, "unreachable", seconds=0.5)
    give_order(tmp_path, order)
    wait_until(lambda: faults._order == order)
    assert faults.current("unreachable") is None and obeyed_at(tmp_path, 4) is None
    assert faults.begin() and not faults.begin()
    assert faults.current("unreachable") == order and faults.current("one_way") is None
    assert obeyed_at(tmp_path, 4) == pytest.approx(time.monotonic(), abs=0.4)
    assert obeyed_at(tmp_path, 5) is None
    time.sleep(0.6)
    assert faults.current("unreachable") is None


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["unreachable", "one_way"])
def test_a_group_cannot_be_reached_or_cannot_reach_another(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(replica, "ReplicaManager", replica.ReplicaManager)  # put back at the end
    lighthouse = start_lighthouse(min_replicas=2)
    about = {"lighthouse_addr": lighthouse.address(), "timeout": 60.0}
    managers = [replica.make_manager(replica_id="a", **about)]
    faults = Faults(tmp_path)
    faults.watch()
    install(faults)
    managers.append(replica.make_manager(replica_id="b", **about))

    def meet(manager):
        manager.start_quorum()
        error = manager.errored()
        manager.should_commit()
        return error and str(error.original_exception)

    def all_meet():
        with ThreadPoolExecutor() as pool:
            return list(pool.map(meet, managers))

    try:
        assert all_meet() == [None, None]
        order = Order(1, kind, seconds=2.0, target="a")
        give_order(tmp_path, order)
        wait_until(lambda: faults._order == order)
        began = time.monotonic()
        of_a, of_b = all_meet()
        assert time.monotonic() - began < 50  # and not gloo's timeout
        blamed = "b" if kind == "unreachable" else "a"
        assert f"replica group {blamed} says it is at {NOWHERE}" in of_b
        assert of_a is not None  # it cannot reach b, or b does not come
        wait_until(lambda: faults.current(kind) is None)
        assert [None, None] in [all_meet() for _ in range(3)]
    finally:
        for manager in managers:
            manager.shutdown()
        lighthouse.shutdown()
