"""The members of a quorum connect all or none, and know soon which it is.

An alarm reaches all members of a connection; a broken collective is not waited for.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace

import pytest
from waiting import wait_until

from composer_replication.replica import addresses
from composer_replication.replica.interruptible_manager import InterruptibleWork
from composer_replication.replica.peer_client import PeerClient
from composer_replication.replica.rendezvous import Rendezvous, SyncAlarm, find_unreachable

NAMES = ["a:1", "b:1", "c:1"]


@pytest.fixture
def boards(start_server):
    return {name: start_server().address for name in NAMES}


def rendezvous(boards, own, number=1, limit_s=20.0):
    client = PeerClient(["secret"], "", 2.0)
    asks = {name: partial(client.ask, address) for name, address in boards.items()}
    return Rendezvous(asks, own, number, limit_s)


def meet(boards, declining=None, cannot_reach=(), number=1):
    """What each member hears, and how long all of it takes."""

    def act(name):
        own = rendezvous(boards, name, number)
        if name == declining:
            own.decline(cannot_reach)
            return "declined"
        try:
            own.wait_for_all()
        except ConnectionError as error:
            return str(error)
        return "connects"

    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(act, NAMES)), time.monotonic() - began


def test_all_connect_if_all_can(boards):
    assert meet(boards)[0] == ["connects"] * 3
    assert meet(boards, number=2)[0] == ["connects"] * 3


@pytest.mark.alone
@pytest.mark.parametrize("declining", NAMES)
@pytest.mark.parametrize("cannot_reach", NAMES)
def test_one_that_cannot_tells_all_whomever_it_cannot_reach(boards, declining, cannot_reach):
    answers, seconds = meet(boards, declining, [cannot_reach])
    answers.remove("declined")
    assert answers == [f"replica group {declining[0]} cannot reach all others"] * 2
    assert seconds < 5


@pytest.mark.slow
def test_one_that_never_answers_is_named(boards):
    with ThreadPoolExecutor(2) as pool:
        waits = [rendezvous(boards, name, limit_s=0.5).wait_for_all for name in NAMES[:2]]
        for wait in [pool.submit(each) for each in waits]:
            with pytest.raises(ConnectionError, match="group c has not said within 0.5 s"):
                wait.result()


@pytest.mark.slow
def test_one_that_dies_before_it_answers_is_noticed_at_once(boards):
    gone = {**boards, "c:1": "127.0.0.1:9"}
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        for wait in [pool.submit(rendezvous(gone, name).wait_for_all) for name in NAMES[:2]]:
            with pytest.raises(ConnectionError, match="c has gone|cannot reach all others"):
                wait.result()
    assert time.monotonic() - began < 10  # of 20


def test_a_member_whose_board_is_gone_is_a_failed_connection(boards):
    gone = {**boards, "a:1": "127.0.0.1:9"}
    with pytest.raises(ConnectionError):
        rendezvous(gone, "b:1").wait_for_all()


def test_all_members_are_tried_at_the_same_time(monkeypatch):
    handles = {f"{number}:1": {"store": f"host:{number}"} for number in range(40)}
    all_begin = Barrier(len(handles), timeout=5.0)
    monkeypatch.setattr(addresses, "can_connect", lambda *_: all_begin.wait() < 0)
    assert find_unreachable(handles, 5.0) == tuple(handles)


# ---- the alarm ----------------------------------------------------------------------------------


@pytest.fixture
def board(start_server):
    return start_server().address


def members(board, number):
    return [alarm_of(board, number) for _ in NAMES]


def alarm_of(board, number):
    return SyncAlarm(partial(PeerClient(["secret"], "", 5.0).ask, board), number)


def wait_until_raised(alarm):
    wait_until(lambda: alarm.age_s() is not None, 60)


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
    alarm_of(board, 1).raise_for_all()
    wait_until_raised(alarm_of(board, 1))


@pytest.mark.slow
def test_the_end_of_the_first_member_is_an_alarm(start_server):
    first = start_server()
    alarm = alarm_of(first.address, 1)
    stays_silent([alarm])
    first.close()
    wait_until_raised(alarm)


def odd_board(*request):
    """It answers what nobody has foreseen."""
    raise TypeError("a number is not iterable")


def test_an_odd_answer_of_the_board_is_an_alarm_too_and_is_logged(caplog):
    wait_until_raised(SyncAlarm(odd_board, 1))
    assert "first member: TypeError: a number is not iterable" in caplog.text


def hung_work():
    """torchft's Work around one of gloo's that does not end."""

    def wait(timeout):
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    return SimpleNamespace(_work=SimpleNamespace(is_completed=lambda: False, wait=wait), wait=None)


@pytest.mark.alone
def test_a_broken_collective_is_not_waited_for():
    broken_at = time.monotonic() + 0.2
    work = InterruptibleWork(hung_work(), lambda: time.monotonic() > broken_at)
    assert work.wait() is False
    assert -0.1 < time.monotonic() - broken_at < 2
