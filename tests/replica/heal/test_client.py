"""What a joiner does with whatever its donor says. Run: pytest tests/replica/heal/test_client.py

Real: sockets on loopback. The donors are strangers and sick lines, byte by byte.
"""

import contextlib
import resource
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from composer_replication.replica.heal.client import (
    LARGEST_OFFER,
    HealClient,
    HealError,
)
from composer_replication.replica.heal.protocol import Offer, Part

CHALLENGE = b"HTTP/1.1 401 Unauthorized\r\nX-Challenge: 0\r\nContent-Length: 0\r\n\r\n"


def client(timeout=1.0):
    return HealClient(["secret"], "joiner", timeout)


@pytest.fixture
def donor():
    """Start a donor that says these bytes after a challenge, the last of them for ever."""
    ends = threading.Event()
    listeners = []

    def start(*said, challenge=CHALLENGE, pause_s=0.05):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(challenge)
                if challenge is CHALLENGE:
                    connection.recv(4096)
                for words in said:
                    connection.sendall(words)
                while not ends.wait(pause_s):
                    connection.sendall(said[-1])

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    ends.set()
    for listener in listeners:
        listener.close()


def seconds_until_refused(ask, *arguments, **options):
    began = time.monotonic()
    with pytest.raises(HealError):
        ask(*arguments, **options)
    return time.monotonic() - began


@pytest.mark.alone
@pytest.mark.parametrize(
    "said",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\nX-Mac: 0\r\n\r\n", b"x"),
        (b"HTTP/1.1 200 OK\r\nX-A: ", b"x"),
        (b"HTTP/1.1 ", b"x"),
    ],
    ids=["body", "header", "status line"],
)
def test_a_donor_that_drips_is_given_up_at_the_deadline(donor, said):
    address = donor(*said)
    waited = seconds_until_refused(client().ask, address, "/latest", time.monotonic() + 0.6)
    assert 0.5 < waited < 1.5


@pytest.mark.alone
def test_one_that_drips_its_challenge_is_given_up_too(donor):
    address = donor(b"x", challenge=b"HTTP/1.1 401 Unauthorized\r\nX-A: ")
    waited = seconds_until_refused(client().ask, address, "/latest", time.monotonic() + 0.6)
    assert 0.5 < waited < 1.5


def test_a_state_that_drips_says_how_far_it_came(donor):
    address = donor(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x")
    with pytest.raises(HealError, match=r"did not arrive in time: \d+ of 60000 bytes"):
        client().fetch(address, Part("0" * 64, 60_000), time.monotonic() + 0.6)


@pytest.mark.parametrize("size", [b"4000000000", b"-5", b"9" * 5000, b"1e9", b"", b"70000"])
def test_no_memory_is_taken_for_what_is_not_authenticated(donor, size):
    address = donor(b"HTTP/1.1 200 OK\r\nContent-Length: " + size + b"\r\n\r\n", bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds_until_refused(client().ask, address, "/latest", time.monotonic() + 0.5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


def test_nor_for_a_state_of_another_size_than_was_offered(donor):
    address = donor(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n", bytes(1 << 20))
    with pytest.raises(HealError, match="sends 4000000000 bytes, and offered 10"):
        client().fetch(address, Part("0" * 64, 10), time.monotonic() + 5)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "http://",
        "http://127.0.0.1:99999999",
        "http://127.0.0.1:port",
        "http://[bad",
        "http://127.0.0.1\r\nX: y:80",
        "http://" + "a" * 70_000 + ":80",
        "http://\u00fc\u00fc..:80",
        "file:///etc/passwd",
    ],
)
def test_an_address_that_is_none_is_a_heal_error(address):
    with pytest.raises(HealError) as caught:
        client().ask(address, "/latest", time.monotonic() + 2)
    assert len(str(caught.value).splitlines()) == 1, "it becomes a line of the log"


@pytest.fixture
def reflector():
    """A stranger without the token that sends back the joiner's own proof, or no ASCII."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            has_proof = "X-Mac" in self.headers
            body = self.path.encode() if has_proof else b""
            self.send_response(200 if has_proof else 401)
            self.send_header("X-Challenge", "0")
            self.send_header("Content-Length", str(len(body)))
            mac = self.headers.get("X-Mac", "") if self.server.reflects else "\xff" * 64
            self.send_header("X-Mac", mac)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("reflects", [True, False])
@pytest.mark.slow
def test_a_joiner_s_own_proof_is_no_proof_of_the_donor(reflector, reflects):
    reflector.reflects = reflects
    address = f"http://127.0.0.1:{reflector.server_address[1]}"
    with pytest.raises(HealError, match="does not know this run's token"):
        client().ask(address, "/latest", time.monotonic() + 5)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"step": "x", "num_bytes": 9, "parts": {}}',
        b'{"step": 1, "num_bytes": 9, "parts": []}',
        b'{"step": 1, "num_bytes": -1, "parts": {}}',
        b'{"step": 1, "num_bytes": 1e30, "parts": {}}',
        b'{"step": 1, "parts": {}}',
        b'{"step": 1, "num_bytes": 9, "parts": {"state": {"name": 3, "num_bytes": 4}}}',
        b'{"step": 1, "num_bytes": 9, "parts": {"state": {"name": "a", "num_bytes": -4}}}',
        b'{"step": 1, "num_bytes": 9, "parts": {"state": {"name": "a"}}}',
        b"[" * 50_000,
        b"\xff",
    ],
)
def test_an_offer_that_is_none_is_a_value_error(text):
    with pytest.raises(ValueError, match="it is no offer of a state"):
        Offer.from_json(text)


def test_an_offer_survives_its_way():
    offer = Offer(7, 9, {"state": Part("ab", 12)})
    assert Offer.from_json(offer.to_json()) == offer
    assert len(offer.to_json()) < LARGEST_OFFER
