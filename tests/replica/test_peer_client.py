"""What a member does with whatever a peer says. Run: pytest tests/replica/test_peer_client.py

Real: sockets on loopback. The peers are strangers and sick lines, byte by byte.
"""

import resource
import time

import pytest
from strange_servers import strange_server

from composer_replication.replica.addresses import listen
from composer_replication.replica.heal.donor import Offer, Part
from composer_replication.replica.peer_client import (
    PeerClient,
    PeerError,
    proof,
    receive,
    send,
)


def in_s(seconds):
    return time.monotonic() + seconds


def ask(address, limit_s=5.0):
    PeerClient(["secret"], "joiner", 1.0).ask(address, "latest", limit_s=limit_s)


def seconds_until_refused(address):
    began = time.monotonic()
    with pytest.raises(PeerError):
        ask(address, 0.6)
    return time.monotonic() - began


def frame(size):
    return size.to_bytes(4, "little")


def strange_peer(answer):
    """A peer that takes a question, and answers whatever a test lets it."""

    def converse(connection):
        send(connection, "challenge", in_s(5))
        answer(connection, receive(connection, 10_000, in_s(5)))

    return strange_server(converse)


def drip(connection, *said):
    """Say these bytes, the last of them for ever."""
    for words in said:
        connection.sendall(words)
    while True:
        time.sleep(0.05)
        connection.sendall(said[-1])


def say(*said):
    return lambda connection, *_: drip(connection, *said)


@pytest.mark.alone
@pytest.mark.parametrize("kind", [strange_peer, strange_server])
def test_a_peer_that_drips_is_given_up_at_the_deadline(kind):
    with kind(say(frame(60_000), b"x")) as address:
        assert 0.5 < seconds_until_refused(address) < 1.5


def fetch(said, size):
    def answer(connection, asked):
        question = (address, "challenge", asked["nonce"], asked["name"], asked["request"])
        signed = proof("secret", "answer", *question, said)
        send(connection, {"answer": said, "proof": signed}, in_s(5))
        drip(connection, b"x")

    with strange_peer(answer) as address:
        into = memoryview(bytearray(size))
        client = PeerClient(["secret"], "joiner", 1.0)
        client.fetch(address, "state", "0" * 64, deadline=in_s(0.6), into=into)


@pytest.mark.slow
def test_a_state_that_drips_says_how_far_it_came():
    with pytest.raises(PeerError, match=r"did not arrive in time: \d+ of 60000 bytes"):
        fetch(60_000, 60_000)


@pytest.mark.parametrize("said", [4_000_000_000, -10, "10", None])
def test_a_state_of_another_size_than_was_offered_is_rejected(said):
    with pytest.raises(PeerError, match=f"sends {said} bytes, and offered 10"):
        fetch(said, 10)


@pytest.mark.parametrize("size", [70_000, 4_000_000_000])
def test_no_memory_is_taken_for_what_is_not_authenticated(size):
    with strange_peer(say(frame(size), bytes(1 << 20))) as address:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds_until_refused(address)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


@pytest.mark.parametrize(
    "address",
    ["", ":", "127.0.0.1", "127.0.0.1:99999999", "127.0.0.1:port", "[bad:1", "127.0.0.1\r\nX: y:80",
     "a" * 70_000 + ":80", "\u00fc\u00fc..:80", "file:///etc/passwd"],
)  # fmt: skip
def test_an_address_that_is_none_is_an_error_of_one_line(address):
    with pytest.raises(PeerError) as caught:
        ask(address)
    assert len(str(caught.value).splitlines()) == 1, "it becomes a line of the log"


@pytest.mark.parametrize("signed", [None, "\xff" * 64, "", 3])
def test_a_joiner_s_own_proof_is_no_proof_of_the_donor(signed):
    def reflect(connection, asked):
        answer = {"answer": asked["request"], "proof": asked["proof"] if signed is None else signed}
        send(connection, answer, in_s(5))

    with strange_peer(reflect) as address:
        with pytest.raises(PeerError, match="does not know this run's token"):
            ask(address)


@pytest.mark.parametrize("odd", [3, None, [], "x"])
def test_an_answer_that_is_none_is_an_error(odd):
    with strange_peer(lambda connection, _: send(connection, odd, in_s(5))) as address:
        with pytest.raises(PeerError, match="it answers"):
            ask(address)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        ["x", 9, False, ["", 0], ["", 0]],
        [1, 9, False, ["", 0]],
        [1, 9, False, None, ["", 0]],
        [1, -1, False, ["", 0], ["", 0]],
        [1, 9, False, [3, 4], ["", 0]],
        [1, 9, False, ["a"], ["", 0]],
        [1, 9, False, ["a", 2**60], ["", 0]],
    ],
)
def test_an_offer_that_is_none_is_an_error(answer):
    with pytest.raises(PeerError, match="^there: .* is no offer of a state"):
        Offer.read(answer, "there")
    offer = Offer.read([7, 9, False, ["ab", 12], ["", 0]], "there")
    assert offer == Offer(7, 9, state=Part("ab", 12))


def test_a_server_that_has_ended_is_not_asked_again():
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(PeerError, match="ConnectionRefusedError"):
        PeerClient(["secret"], "", 60.0).ask(f"127.0.0.1:{port}", "read", "a")
    assert time.monotonic() - began < 30
