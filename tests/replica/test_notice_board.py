"""Notices: who may leave them, who may read them, and what a stranger can take from their host."""

import socket

import pytest

from composer_replication.replica import notice_board
from composer_replication.replica.notice_board import NoticeBoard, Notices


@pytest.fixture
def board():
    board = NoticeBoard("127.0.0.1", ["secret", "old"])
    yield board
    board.close()


def place(board):
    host, _, port = board.address.rpartition(":")
    return host, int(port)


def test_what_one_member_leaves_the_others_read(board):
    one, other = (Notices(board.address, ["secret"], 5.0) for _ in range(2))
    one.post("a/1", "yes")
    one.post("a/2", "no")
    one.post("a/1", "maybe")
    assert other.read(["a/1", "a/2", "a/3"]) == {"a/1": "maybe", "a/2": "no"}


@pytest.mark.parametrize("token", ["another", "", "ü"])
def test_without_the_token_nobody_leaves_a_notice(board, token):
    Notices(board.address, [token], 5.0).post("a/1", "yes")
    assert Notices(board.address, ["secret"], 5.0).read(["a/1"]) == {}


def test_while_a_token_is_replaced_the_old_one_is_accepted(board):
    Notices(board.address, ["old", "secret"], 5.0).post("a/1", "yes")
    assert Notices(board.address, ["secret"], 5.0).read(["a/1"]) == {"a/1": "yes"}


ODD = [b"\n", b"[1]\n", b"no JSON\n", b'{"post": 1}\n', b'{"read": 3}\n', b"[" * 10_000 + b"\n",
       b'{"post": "k", "value": [], "proof": null}\n', b"x" * 100_000 + b"\n"]  # fmt: skip


@pytest.mark.parametrize("request_line", ODD, ids=range(len(ODD)))
def test_an_odd_request_ends_its_connection_alone(board, request_line):
    with socket.create_connection(place(board), 5.0) as stranger:
        stranger.sendall(request_line)
        stranger.settimeout(5.0)
        try:
            assert b"k" not in stranger.recv(100)
        except ConnectionResetError:
            pass
    test_what_one_member_leaves_the_others_read(board)


def test_old_notices_make_room_for_new_ones(board, monkeypatch):
    monkeypatch.setattr(notice_board, "MOST_NOTICES", 3)
    member = Notices(board.address, ["secret"], 5.0)
    for number in range(5):
        member.post(str(number), "yes")
    assert sorted(member.read(map(str, range(5)))) == ["2", "3", "4"]


def test_what_is_no_board_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:
        notices = Notices(f"127.0.0.1:{server.getsockname()[1]}", ["secret"], 0.3)
        with pytest.raises(OSError):
            notices.read(["a"])


def test_the_proof_is_for_one_key_and_value():
    pairs = [("a", "b"), ("ab", ""), ("b", "a")]
    assert len({notice_board._proof(*pair, "token") for pair in pairs}) == 3
