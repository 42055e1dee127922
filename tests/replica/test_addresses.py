"""Where a group listens and under which name it is reached.

Run: pytest tests/replica/test_addresses.py.

Real: this machine's interfaces and sockets.
"""

import socket

import pytest
from replica.listening import listening_addresses

from composer_replication.replica import addresses
from composer_replication.replica.addresses import (
    address_towards,
    check_hostname,
    default_hostname,
    interface_of,
    listen,
    own_address,
)


def test_an_address_behind_a_gateway_is_on_no_interface():
    assert interface_of("192.0.2.1") is None  # TEST-NET-1: nobody's


def test_a_host_name_that_leads_elsewhere_or_everybody_home_is_refused():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    check_hostname("127.0.0.1", port, "http://127.0.0.1:29510")  # all on this machine
    with pytest.raises(ValueError, match="hostname='192.0.2.1' does not lead to this machine"):
        check_hostname("192.0.2.1", port, "http://127.0.0.1:29510")
    # Debian's entry for a machine's own name, 127.0.1.1, with the others on other machines.
    with pytest.raises(ValueError, match="'127.0.0.1' is a loopback address here"):
        check_hostname("127.0.0.1", port, "http://192.0.2.1:29510")
    listener.close()


@pytest.mark.parametrize(
    ("own", "chosen"),
    [("10.0.0.7", "10.0.0.7"), ("2001:db8::7", "2001:db8::7"), ("127.0.0.1", None), ("::1", None),
     ("169.254.0.7", None), ("fe80::7%eth0", None), (None, None)],
)  # fmt: skip
def test_without_a_name_peers_are_given_the_address_towards_the_lighthouse(
    own, chosen, monkeypatch
):
    assert address_towards("http://127.0.0.1:29510") == "127.0.0.1"
    assert address_towards("http://[::1]:29510") == "::1"
    assert address_towards("http://no.such.name.invalid:29510") is None
    monkeypatch.setattr(addresses, "address_towards", lambda _: own)
    assert default_hostname("http://head:29510") == chosen


@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1", "[::1]"])
def test_a_group_listens_on_the_address_it_is_told_and_no_other(hostname):
    with listen(hostname) as listener:
        address, port = listener.getsockname()[:2]
        assert address == hostname.strip("[]") == own_address(hostname)
        # Not by a connection to another address, where somebody else may listen on the same port.
        assert [own[0] for own in listening_addresses() if own[1] == port] == [address]


@pytest.mark.parametrize("hostname", [None, "192.0.2.1"])
def test_without_an_address_of_its_own_a_group_listens_on_all(hostname):
    with listen(hostname) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=2).close()
