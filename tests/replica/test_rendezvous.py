"""The members of a quorum connect all or none, and know soon which it is."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from composer_replication.replica.peer_client import Notices
from composer_replication.replica.rendezvous import Rendezvous

NAMES = ["a:1", "b:1", "c:1"]


@pytest.fixture
def boards(start_server):
    return {name: start_server().address for name in NAMES}


def rendezvous(boards, own, number=1, limit_s=20.0):
    notices = {name: Notices(address, ["secret"], 2.0) for name, address in boards.items()}
    return Rendezvous(notices, own, number, limit_s)


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


def test_a_member_whose_board_is_gone_is_a_failed_connection(boards):
    gone = {**boards, "a:1": "127.0.0.1:9"}
    with pytest.raises(ConnectionError):
        rendezvous(gone, "b:1").wait_for_all()
