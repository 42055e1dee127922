"""What a rank's server gives to peers, and what strangers can do to it.

Run: pytest tests/replica/test_peer_server.py.

Real: the server, its sockets and threads. The strangers know its address and have no token.
"""

import contextlib
import errno
import logging
import socket
import time
from unittest.mock import Mock

import pytest
from waiting import wait_until

from composer_replication.replica import peer_server
from composer_replication.replica.addresses import host_and_port
from composer_replication.replica.peer_client import (
    PeerClient,
    PeerError,
    proof,
    receive,
    send,
)


@pytest.fixture
def server(start_server):
    server = start_server("secret", "old")
    server.answers["latest"] = lambda: [4]
    return server


def soon():
    return time.monotonic() + 5.0


def ask(server, *tokens, request=("latest",)):
    client = PeerClient(tokens or ["secret"], "joiner", 5.0)
    return client.ask(server.address, *request)


def post(server, key, notice, *tokens):
    ask(server, *tokens, request=("post", key, notice))


def read(server, *keys, tokens=()):
    return ask(server, *tokens, request=("read", *keys))


def connect(server, host="127.0.0.1"):
    source = host, 0
    return socket.create_connection(host_and_port(server.address), 10, source_address=source)


class Conversation:
    """A joiner's request, which a test can change, record and send again."""

    def __init__(self, server):
        self.connection, self.address = connect(server), server.address
        self.challenge = receive(self.connection, 100, soon())

    def question(self, **changes):
        names = ("address", "challenge", "nonce", "name", "request")
        values = (self.address, self.challenge, "a nonce", "joiner", ["latest"])
        return dict(zip(names, values, strict=True)) | changes

    def send(self, question, signed):
        sent = {name: question[name] for name in ("nonce", "name", "request")}
        send(self.connection, sent | {"proof": signed}, soon())
        return receive(self.connection, 1000, soon()).get("error")


@pytest.fixture
def talk(server):
    talk = Conversation(server)
    with talk.connection:
        yield talk


def signed(question, kind="question"):
    return proof("secret", kind, *question.values())


def test_who_knows_a_token_is_answered(server):
    assert ask(server, "secret") == ask(server, "old", "secret") == [4]
    with pytest.raises(PeerError, match="has no 'state of affairs'"):
        ask(server, request=["state", "of", "affairs"])


def test_an_answer_that_fails_is_logged_here_and_an_error_there_at_once(server, caplog):
    server.answers["copy"] = Mock(side_effect=MemoryError("no room for the copy"))
    with pytest.raises(PeerError, match="could not answer 'copy': its log has the reason"):
        ask(server, request=["copy"])
    assert caplog.messages == [
        "Could not answer 'copy' of group joiner at 127.0.0.1: MemoryError: no room for the copy"
    ]


@pytest.mark.parametrize(
    "changed", [{"address": "10.0.0.1:80"}, {"request": ["read"]}, {"name": "b"}, {"nonce": "b"}]
)
def test_a_question_that_was_made_for_another_server_or_changed_on_the_way_is_refused(
    talk, changed
):
    # A stranger that joiners ask first cannot pass their questions on to an honest donor.
    assert talk.send(talk.question(), signed(talk.question(**changed))) == "rejected"


def test_a_recorded_question_is_worth_nothing(server, talk):
    recorded = signed(talk.question())
    assert talk.send(talk.question(), recorded) is None
    later = Conversation(server)
    with later.connection:
        assert later.challenge != talk.challenge
        assert later.send(talk.question(), recorded) == "rejected"


@pytest.mark.parametrize("odd", ["", "0" * 64, "\xff" * 64, None, 3, [], "an answer's"])
def test_a_proof_that_is_none_is_refused(server, talk, odd):
    odd = signed(talk.question(), "answer") if odd == "an answer's" else odd
    assert talk.send(talk.question(), odd) == "rejected"
    assert ask(server) == [4]


@pytest.mark.alone
def test_who_proves_nothing_in_time_is_hung_up_on(server, monkeypatch):
    monkeypatch.setattr(peer_server, "PROOF_WITHIN_S", 0.5)
    began = time.monotonic()
    with connect(server) as dripping, contextlib.suppress(OSError):
        dripping.sendall(b"\x00\x01\x00\x00")
        while time.monotonic() - began < 5:
            dripping.sendall(b"[")
            time.sleep(0.05)
    assert 0.3 < time.monotonic() - began < 3


ODD = [{}, [1], 3, None, {"request": "latest"}, {"nonce": [], "name": {}, "request": 3, "proof": 4}]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_an_odd_request_ends_its_connection_alone(server, talk, odd):
    send(talk.connection, odd, soon())
    with contextlib.suppress(ConnectionResetError):
        assert receive(talk.connection, 1000, soon()) == {"error": "rejected"}
    assert ask(server) == [4]


@pytest.mark.parametrize(
    "odd", [b"\xff" * 4 + b"a" * 2_000_000, b"\x04\x00\x00\x00\xff\xff\xff\xff", b"GET / HTTP/1.1"]
)
def test_what_is_no_request_is_not_kept(server, odd):
    with connect(server) as bomb, contextlib.suppress(OSError):
        bomb.sendall(odd)
        bomb.shutdown(socket.SHUT_WR)
        receive(bomb, 100, soon())
        assert bomb.recv(1) == b""
    assert ask(server) == [4]


def test_rejections_are_one_line_a_minute(server, caplog):
    for _ in range(20):
        with pytest.raises(PeerError, match="does not accept this group's token: set COMPOSER_REP"):
            ask(server, "guessed")
    lines = [record.getMessage() for record in caplog.records]
    rejected = "request for the global state from 127.0.0.1, who says to be 'joiner'"
    assert len([line for line in lines if rejected in line]) == 1
    assert "guessed" not in caplog.text


# ---- notices -----------------------------------------------------------------------------------


def test_what_one_member_leaves_the_others_read(server):
    post(server, "a/1", "yes")
    post(server, "a/2", "no")
    post(server, "a/1", "maybe")
    found = read(server, "a/1", "a/2", "a/3", tokens=["old", "secret"])
    assert found == {"a/1": "maybe", "a/2": "no"}


@pytest.mark.parametrize("token", ["another", "", "ü"])
def test_without_the_token_nobody_leaves_a_notice_or_reads_one(server, token):
    with pytest.raises(PeerError):
        post(server, "a", "b", token)
    assert read(server, "a") == {}
    with pytest.raises(PeerError):
        read(server, "a", tokens=[token])


def test_old_notices_make_room_for_new_ones(server, monkeypatch):
    monkeypatch.setattr(peer_server, "MOST_NOTICES", 3)
    for number in range(5):
        post(server, str(number), "yes")
    assert sorted(read(server, *map(str, range(5)))) == ["2", "3", "4"]


# ---- the line ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_file_descriptors_a_server_waits_and_does_not_spin(server, monkeypatch, caplog):
    accepts, port, accept = [], host_and_port(server.address)[1], socket.socket.accept

    def fail(listener):
        if listener.getsockname()[1] != port:  # a server of another test
            return accept(listener)
        accepts.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(peer_server, "ACCEPT_PAUSE_S", 0.1)
    with monkeypatch.context() as shortage:
        shortage.setattr(socket.socket, "accept", fail)
        with connect(server):
            time.sleep(0.55)
        assert 1 <= len(accepts) <= 8
        assert caplog.text.count("Cannot accept a connection") == 1
    post(server, "a", "yes")


def serve_state(server, *parts):
    """Have the server give a body of these parts."""
    server.answers["state"] = lambda name: peer_server.Served([*map(memoryview, parts)])


def test_a_line_that_takes_a_part_of_what_it_is_given_gets_all_of_it_once(server, monkeypatch):
    # Loopback takes whole parts; here each of the three ways to end within them is met.
    sizes = [1, 0, 4000, 999, 1000, 1001, *range(2000), 0]
    parts = [bytes((size + i) % 251 for i in range(size)) for size in sizes]
    serve_state(server, *parts)
    taken = []

    def take_a_part(line, given):
        given = list(given)
        assert 0 < len(given) <= peer_server.PARTS_A_CALL and all(map(len, given))
        assert line.gettimeout() is None
        assert any(line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16))
        first = len(given[0])
        room = [1000, first, first + 1][len(taken) % 3]
        taken.append(b"".join(given)[:room])
        line.sendall(taken[-1])
        return len(taken[-1])

    monkeypatch.setattr(socket.socket, "sendmsg", take_a_part)
    into = bytearray(sum(sizes))
    client = PeerClient(["secret"], "joiner", 5.0)
    client.fetch(server.address, "state", "x", deadline=soon(), into=memoryview(into))
    assert into == b"".join(parts)


@pytest.mark.slow
def test_a_joiner_that_takes_nothing_is_given_up(server, talk, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, peer_server.__name__)
    monkeypatch.setattr(peer_server, "SILENT_S", 1)
    serve_state(server, bytes(50_000_000))
    question = talk.question(request=["state", "x"])
    assert talk.send(question, signed(question)) is None
    wait_until(lambda: "BlockingIOError" in caplog.text, 10.0)
