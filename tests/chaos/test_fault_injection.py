"""A process that fails when it is ordered to. Run: pytest tests/chaos/test_fault_injection.py

Real: processes, signals, request files, and in the test of the network the lighthouse, managers and
gloo.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from chaos.at_start.fault_injection import (
    AT_START,
    NOWHERE,
    FaultRequest,
    GroupFaults,
    fault_began_at,
    install,
    request_fault,
    unreliable,
)
from waiting import wait_until

from composer_replication.replica import factory as replica
from composer_replication.replica.lighthouse import start_lighthouse

HANGS = """
import os, pathlib, sys, threading, time
sys.path.insert(0, sys.argv[2])
from fault_injection import GroupFaults

def say(word):
    os.write(1, word.encode() + b"\\n")  # one call, so that no line of another thread is in it

def repeat(word):
    while True:
        say(word)
        time.sleep(0.1)

class Counted(GroupFaults):
    num_signals = 0

    def _hang(self, number, frame):
        self.num_signals += 1
        super()._hang(number, frame)

faults = Counted(pathlib.Path(sys.argv[1]))
faults.watch()
threading.Thread(target=repeat, args=["beat"], daemon=True).start()
"""
TRAINS = 'repeat("step")'
SYNCS = """
import time

def sync():
    say("sync")
    while faults.num_signals < 3:
        time.sleep(0.02)
    say("end of sync")
"""


@contextmanager
def process_of(program, folder):
    """A process of the program, whose lines are read from `stdout`."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, folder, AT_START], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(line, process):
    """Read up to this line, for 90 s of beats at most."""
    assert line in (process.stdout.readline() for _ in range(900))


def check_that_only_the_main_thread_hangs(process, folder):
    wait_until(lambda: fault_began_at(folder, 1) is not None)
    beats = 0
    for _ in range(900):  # the first of them may be from before
        beats = beats + 1 if process.stdout.readline() == "beat\n" else 0
        if beats == 20:
            break
    assert beats == 20 and process.poll() is None


@pytest.mark.integration
def test_only_the_main_thread_of_a_process_that_hangs_stands_still(tmp_path):
    with process_of(HANGS + TRAINS, tmp_path) as process:
        assert {process.stdout.readline() for _ in range(6)} == {"beat\n", "step\n"}
        request_fault(tmp_path, FaultRequest(1, "hang"))
        check_that_only_the_main_thread_hangs(process, tmp_path)


@pytest.mark.integration
def test_a_group_hangs_where_it_trains_and_not_in_a_sync(tmp_path):
    """What a sync waits for has timeouts, and its time is no hang to the group's own watch."""
    module = "{'__name__': 'composer_replication.diloco.test', 'say': say, 'faults': faults}"
    sync = f"namespace = {module}\nexec({SYNCS!r}, namespace)\nnamespace['sync']()\n"
    with process_of(HANGS + sync + TRAINS, tmp_path) as process:
        read_until("sync\n", process)
        request_fault(tmp_path, FaultRequest(1, "hang"))
        read_until("end of sync\n", process)  # which comes after the third order to hang
        check_that_only_the_main_thread_hangs(process, tmp_path)


IMPORTS = """
import sys
import composer_replication
print("fault_injection" in sys.modules)
from composer_replication.replica import factory
print(factory.ReplicaManager.__name__, sys.modules["sitecustomize"].__file__, HIDDEN)
"""


@pytest.mark.integration
def test_any_python_process_with_these_variables_fails_on_request(tmp_path, monkeypatch):
    # A sitecustomize of the machine's own is imported too.
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.HIDDEN = 'hidden one'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    environ = os.environ | {"COMPOSER_REPLICATION_RUN_DIR": str(tmp_path), "REPLICA_GROUP_ID": "0"}
    environ |= unreliable(environ)
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "False"  # nothing happens in processes that build no manager
    assert lines[1] == f"UnreliableManager {AT_START / 'sitecustomize.py'} hidden one"


def test_an_order_of_its_last_life_is_not_for_a_process(tmp_path):
    request = FaultRequest(1, "unreachable")
    request_fault(tmp_path, request)
    faults = GroupFaults(tmp_path)
    assert not faults.begin() and faults.current("unreachable") is None


@pytest.mark.alone
def test_an_order_holds_from_the_next_sync_on_for_so_long(tmp_path):
    faults = GroupFaults(tmp_path)
    faults.watch()
    request = FaultRequest(4, "unreachable", seconds=0.5)
    request_fault(tmp_path, request)
    wait_until(lambda: faults._request == request)
    assert faults.current("unreachable") is None and fault_began_at(tmp_path, 4) is None
    assert faults.begin() and not faults.begin()
    assert faults.current("unreachable") == request and faults.current("one_way") is None
    assert fault_began_at(tmp_path, 4) == pytest.approx(time.monotonic(), abs=0.4)
    assert fault_began_at(tmp_path, 5) is None
    time.sleep(0.6)
    assert faults.current("unreachable") is None


@pytest.mark.alone
@pytest.mark.integration
@pytest.mark.parametrize("kind", ["unreachable", "one_way"])
def test_a_group_cannot_be_reached_or_cannot_reach_another(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(replica, "ReplicaManager", replica.ReplicaManager)  # put back at the end
    lighthouse = start_lighthouse(min_replicas=2)
    # With 2 nobody is left out: both are in each quorum.
    about = {"lighthouse_addr": lighthouse.address(), "timeout": 60.0, "min_replica_size": 2}
    managers = [replica.make_manager(replica_id="a", **about)]
    faults = GroupFaults(tmp_path)
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
        request = FaultRequest(1, kind, seconds=2.0, target="a")
        request_fault(tmp_path, request)
        wait_until(lambda: faults._request == request)
        began = time.monotonic()
        of_a, of_b = all_meet()
        assert time.monotonic() - began < 20  # and not gloo's timeout
        blamed = "b" if kind == "unreachable" else "a"
        assert f"replica group {blamed} says it is at" in of_b
        assert (NOWHERE in of_b) == (kind == "unreachable")
        assert of_a is not None  # it cannot reach b, or b does not come
        wait_until(lambda: faults.current(kind) is None)
        assert [None, None] in [all_meet() for _ in range(3)]
    finally:
        for manager in managers:
            manager.shutdown()
        lighthouse.shutdown()
