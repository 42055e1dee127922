"""An alarm reaches all members of a connection; a broken collective is not waited for."""

import time
from types import SimpleNamespace

import pytest

from composer_replication.replica.interruptible_manager import InterruptibleWork
from composer_replication.replica.peer_client import Notices
from composer_replication.replica.rendezvous import SyncAlarm

TOKENS = ["secret"]


@pytest.fixture
def board(start_server):
    return start_server(*TOKENS).address


def members(board, number, count=3):
    return [SyncAlarm(Notices(board, TOKENS, 5.0), number) for _ in range(count)]


def wait_until_raised(alarm):
    deadline = time.monotonic() + 60
    while alarm.age_s() is None:
        assert time.monotonic() < deadline, "nobody told it"
        time.sleep(0.01)


def stays_silent(alarms, seconds=0.6):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        assert [alarm.age_s() for alarm in alarms] == [None] * len(alarms)
        time.sleep(0.05)


@pytest.mark.slow
def test_one_member_tells_all_and_no_other_connection(board):
    one, another = members(board, 1), members(board, 2)
    stays_silent([*one, *another])
    one[1].raise_for_all()
    assert one[1].age_s() is not None
    for alarm in one:
        wait_until_raised(alarm)
    stays_silent(another)


def test_a_member_that_comes_to_listen_later_hears_it_too(board):
    members(board, 1)[0].raise_for_all()
    wait_until_raised(members(board, 1)[0])


def test_the_end_of_the_first_member_is_an_alarm(start_server):
    first = start_server(*TOKENS)
    alarm = SyncAlarm(Notices(first.address, TOKENS, 5.0), 1)
    stays_silent([alarm])
    first.close()
    wait_until_raised(alarm)


def hung_work():
    """torchft's Work around one of gloo's that does not end."""
    return SimpleNamespace(_work=SimpleNamespace(is_completed=lambda: False), wait=None)


@pytest.mark.alone
def test_a_broken_collective_is_not_waited_for():
    broken_at = time.monotonic() + 0.2
    work = InterruptibleWork(hung_work(), lambda: time.monotonic() > broken_at)
    assert work.wait() is False
    assert -0.1 < time.monotonic() - broken_at < 2
