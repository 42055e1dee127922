"""Where a group listens and under which name it is reached.

Run: pytest tests/replica/test_addresses.py.

Real: this machine's interfaces and sockets.
"""

import socket

import psutil
import pytest

from composer_replication.replica.addresses import (
    bracketed,
    check_hostname,
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
    ("host", "written"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1"), ("a", "a")],
)
def test_an_ipv6_address_is_bracketed_once(host, written):
    assert bracketed(host) == written


@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1", "[::1]"])
def test_a_group_listens_on_the_address_it_is_told_and_no_other(hostname):
    with listen(hostname) as listener:
        address, port = listener.getsockname()[:2]
        assert address == hostname.strip("[]") == own_address(hostname)
        # Not by a connection to another address, where somebody else may listen on the same port.
        sockets = psutil.Process().net_connections("inet")
        listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
        assert [own.ip for own in listening if own.port == port] == [address]


@pytest.mark.parametrize("hostname", [None, "192.0.2.1"])
def test_without_an_address_of_its_own_a_group_listens_on_all(hostname):
    with listen(hostname) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=2).close()
