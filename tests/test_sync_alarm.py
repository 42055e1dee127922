"""An alarm reaches all members of a connection; a broken collective is not waited for."""

import subprocess
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from composer_replication.sync_alarm import SyncAlarm
from composer_replication.waiting import InterruptibleWork

TIMEOUT = timedelta(seconds=5)


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def members(store, number, count=3):
    return [SyncAlarm(f"127.0.0.1:{store.port}", number, TIMEOUT) for _ in range(count)]


def wait_until_raised(alarm):
    deadline = time.monotonic() + 5
    while alarm.age_s() is None:
        assert time.monotonic() < deadline, "nobody told it"
        time.sleep(0.01)


def test_one_member_tells_all_and_no_other_connection(store):
    one, another = members(store, 1), members(store, 2)
    for _ in range(5):
        assert [alarm.age_s() for alarm in [*one, *another]] == [None] * 6
        time.sleep(0.1)
    one[1].raise_for_all()
    assert one[1].age_s() is not None
    for alarm in one:
        wait_until_raised(alarm)
    assert [alarm.age_s() for alarm in another] == [None] * 3


def test_a_member_that_comes_to_listen_later_hears_it_too(store):
    members(store, 1)[0].raise_for_all()
    wait_until_raised(members(store, 1)[0])


def test_the_end_of_the_first_member_is_an_alarm():
    host = (
        "from torch.distributed import TCPStore; import sys; "
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
        "print(store.port, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    alarm = SyncAlarm(f"127.0.0.1:{process.stdout.readline().strip()}", 1, TIMEOUT)
    for _ in range(5):
        assert alarm.age_s() is None
        time.sleep(0.1)
    process.kill()
    wait_until_raised(alarm)
    process.communicate()


def hung_work():
    """torchft's Work around one of gloo's that does not end."""
    return SimpleNamespace(_work=SimpleNamespace(is_completed=lambda: False), wait=None)


def test_a_broken_collective_is_not_waited_for():
    broken_at = time.monotonic() + 0.2
    work = InterruptibleWork(hung_work(), lambda: time.monotonic() > broken_at)
    assert work.wait() is False
    assert 0.1 < time.monotonic() - broken_at + 0.2 < 2
