"""What strangers can do to a training process's heal server.

Run: pytest tests/replica/heal/test_server.py.

Real: the server, its sockets and threads. The strangers know its address and have no token.
"""

import contextlib
import socket
import time
from dataclasses import replace
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from composer_replication.replica.addresses import listen
from composer_replication.replica.heal import server as heal_server
from composer_replication.replica.heal.client import HealClient, HealError
from composer_replication.replica.heal.protocol import (
    CHALLENGE,
    CLIENT_NAME,
    MAC,
    NONCE,
    Offer,
    Question,
)
from composer_replication.replica.heal.server import HealServer

ANSWER = [memoryview(Offer(4).to_json())]


@contextlib.contextmanager
def answer(path):
    if path != "/latest":
        raise KeyError(path)
    yield ANSWER


@pytest.fixture
def server():
    listener = listen("127.0.0.1")
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = HealServer(listener, address, ["secret"], answer)
    server.start()
    yield server
    server.stop()


def ask(server, token="secret", timeout=5.0):
    client = HealClient([token], "joiner", timeout)
    return client.ask(server.address, "/latest", time.monotonic() + timeout)


def connect(server):
    return socket.create_connection(server.server_address[:2], timeout=10)


@contextlib.contextmanager
def idle_connections(server, count):
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(server))
        yield


class Conversation:
    """A joiner's two requests, which a test can record, change and send again."""

    def __init__(self, server):
        parts = urlsplit(server.address)
        self.connection = HTTPConnection(parts.hostname, parts.port, timeout=5)

    def challenge(self):
        self.connection.request("GET", "/latest")
        reply = self.connection.getresponse()
        reply.read()
        assert reply.status == 401
        return reply.getheader(CHALLENGE)

    def send(self, question, mac):
        headers = {NONCE: question.nonce, CLIENT_NAME: question.client_name, MAC: mac}
        self.connection.request("GET", question.path, headers=headers)
        reply = self.connection.getresponse()
        reply.read()
        return reply.status


def question_for(server, challenge):
    return Question(server.address, "/latest", "joiner", challenge, "a nonce")


def test_who_knows_the_token_is_answered(server):
    assert ask(server) == Offer(4)


def test_a_question_for_another_server_is_refused(server):
    # A stranger that joiners ask first cannot pass their questions on to an honest donor.
    talk = Conversation(server)
    question = replace(question_for(server, talk.challenge()), address="http://10.0.0.1:80")
    assert talk.send(question, question.proof("secret")) == 403


@pytest.mark.parametrize("changed", ["path", "client_name", "nonce"])
def test_a_question_that_was_changed_on_the_way_is_refused(server, changed):
    talk = Conversation(server)
    question = question_for(server, talk.challenge())
    proof = question.proof("secret")
    assert talk.send(replace(question, **{changed: "/latest/other"}), proof) == 403


def test_a_recorded_question_is_worth_nothing(server):
    talk = Conversation(server)
    question = question_for(server, talk.challenge())
    proof = question.proof("secret")
    assert talk.send(question, proof) == 200
    assert Conversation(server).send(question, proof) == 403  # without a challenge
    later = Conversation(server)
    assert later.challenge() != question.challenge
    assert later.send(question, proof) == 403


def test_the_proof_of_an_answer_is_none_of_a_question(server):
    talk = Conversation(server)
    question = question_for(server, talk.challenge())
    assert talk.send(question, question.proof_of_answer("secret", b"")) == 403


@pytest.mark.parametrize("mac", ["", "0" * 64, "\xff" * 64])
def test_a_proof_that_is_none_is_refused(server, mac):
    talk = Conversation(server)
    assert talk.send(question_for(server, talk.challenge()), mac) == 403
    assert ask(server) == Offer(4)


def test_the_host_with_most_idle_connections_loses_them_first(server):
    honest = socket.create_connection(
        server.server_address[:2], timeout=10, source_address=("127.0.0.2", 0)
    )
    with honest, idle_connections(server, 100):
        time.sleep(0.3)
        honest.sendall(b"GET /latest HTTP/1.1\r\n\r\n")
        assert honest.recv(1000).startswith(b"HTTP/1.1 401")


@pytest.mark.alone
def test_who_proves_nothing_in_time_is_hung_up_on(server, monkeypatch):
    monkeypatch.setattr(heal_server, "PROOF_WITHIN_S", 0.5)
    began = time.monotonic()
    with connect(server) as dripping:
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 5:
                dripping.sendall(b"G")
                time.sleep(0.05)
        assert 0.3 < time.monotonic() - began < 3


def test_a_head_of_many_lines_is_not_kept(server):
    with connect(server) as bomb, contextlib.suppress(OSError):
        bomb.sendall(b"GET / HTTP/1.1\r\n")
        for _ in range(95):
            bomb.sendall(b"X: " + b"a" * 65_000 + b"\r\n")
        assert bomb.recv(1) == b""
    assert ask(server) == Offer(4)


def test_rejections_are_one_line_a_minute(server, caplog):
    for _ in range(20):
        with pytest.raises(HealError, match="403 Forbidden .* does not accept this group's token"):
            ask(server, "guessed")
    lines = [record.getMessage() for record in caplog.records]
    rejected = "request for the global state from 127.0.0.1, who says to be 'joiner'"
    assert len([line for line in lines if rejected in line]) == 1
    assert "guessed" not in caplog.text
