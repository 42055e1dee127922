"""Servers that end with their test."""

from contextlib import ExitStack

import pytest

from composer_replication.replica import lighthouse
from composer_replication.replica.peer_server import PeerServer


@pytest.fixture
def ends():
    """What is entered here ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_lighthouse(ends):
    """Start a lighthouse, with options of ``start_lighthouse``, and return its address."""

    def start(**options):
        server = lighthouse.start_lighthouse(**options)
        ends.callback(server.shutdown)
        return server.address()

    return start


@pytest.fixture
def start_server(ends):
    """Start a rank's server on loopback; it accepts these tokens."""

    def start(*tokens):
        server = PeerServer("127.0.0.1", tokens or ["secret"])
        ends.callback(server.close)
        return server

    return start
