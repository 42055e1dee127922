"""The address under which peers reach this machine, and where it listens.

Imports neither torch nor torchft.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil

from composer_replication.replica.lighthouse import CONNECT_TIMEOUT_S, can_connect

HOSTNAME_FIX = (
    "set COMPOSER_REPLICATION_HOSTNAME (hostname=...) to a name or address of this machine that "
    "the other groups reach; `composer-replication doctor --hostname NAME` tries one"
)


def bracketed(host: str) -> str:
    """Put an IPv6 literal in brackets, as ``host:port`` and URLs need it; other hosts stay."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``host:port`` or ``http://host:port``; an IPv6 literal loses its brackets.

    Raises:
        ValueError: It is neither.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{address!r:.200} is no address: use host:port")
    return host.strip("[]"), int(port)


def does_answer(address: str, limit_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether something accepts a connection at ``host:port`` or a URL; not if it is neither."""
    try:
        return can_connect(*host_and_port(address), limit_s)
    except ValueError:  # a stranger has written it
        return False


def own_address(hostname: str | None) -> str | None:
    """Find the address of a host name that belongs to this machine.

    Returns:
        The first such address. None if there is no name, or if it resolves to no address of this
        machine, for example to a gateway in front of it.

    Raises:
        ValueError: The name does not resolve.
    """
    if hostname is None:
        return None
    try:
        addresses = _resolved(hostname)
    except OSError as error:
        raise ValueError(
            f"hostname={hostname!r} does not resolve here ({error}): {HOSTNAME_FIX}"
        ) from None
    own = _own_addresses()
    return next((address for address in addresses if address in own), None)


def interface_of(hostname: str | None) -> str | None:
    """Find the network interface that has the address of a host name; None as in ``own_address``.

    Raises:
        ValueError: The name does not resolve.
    """
    return _own_addresses().get(own_address(hostname) or "")


def address_towards(address: str) -> str | None:
    """Find the address of this machine from which packets to an ``http://host:port`` leave.

    Returns:
        The address. None if the host's name does not resolve, or no network leads there.
    """
    parts = urlsplit(address)
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, _, _, place = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # looks up the route, and sends nothing
            return probe.getsockname()[0]
    return None


def default_hostname(lighthouse_addr: str) -> str | None:
    """Choose how peers reach this machine if no ``hostname`` is given.

    Peers reach the lighthouse too, so most probably they reach the address from which this machine
    does. The machine's own name may lead to a loopback address, or be unknown to the others.

    Args:
        lighthouse_addr: ``http://host:port`` of the lighthouse.

    Returns:
        That address. None if only this machine can use it: then the machine's own name is used.
    """
    address = address_towards(lighthouse_addr)
    if address is None:
        return None
    own = ip_address(address)
    return None if own.is_loopback or own.is_link_local or own.is_unspecified else address


def listen(hostname: str | None) -> socket.socket:
    """Listen on a free port of the address of a host name.

    Args:
        hostname: How peers reach this machine. If it is None, or resolves to no address of this
            machine, the socket listens on all interfaces, since peers may use any of them.
    """
    address = own_address(hostname) or ""
    is_dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096, dualstack_ipv6=is_dual)


def check_hostname(hostname: str, port: int, lighthouse_addr: str) -> None:
    """Check that peers can reach this machine under a name.

    The name must resolve to this machine. It must not be a loopback address, unless the lighthouse
    is on this machine too.

    Args:
        hostname: The name that this group is going to advertise.
        port: A port on which this process listens.
        lighthouse_addr: ``http://host:port`` of the lighthouse.

    Raises:
        ValueError: Peers could not reach this group under the name.
    """
    if not can_connect(hostname.strip("[]"), port):
        raise ValueError(f"hostname={hostname!r} does not lead to this machine: {HOSTNAME_FIX}")
    lighthouse = urlsplit(lighthouse_addr).hostname or ""
    is_local = is_loopback(lighthouse) or _addresses(lighthouse) & _own_addresses().keys()
    if is_loopback(hostname) and not is_local:
        raise ValueError(
            f"hostname={hostname!r} is a loopback address here, and the lighthouse is on another "
            f"machine: {HOSTNAME_FIX}"
        )


def is_loopback(hostname: str) -> bool:
    """Whether all addresses of a name are loopback addresses."""
    addresses = _addresses(hostname)
    return bool(addresses) and all(ip_address(each).is_loopback for each in addresses)


def _resolved(hostname: str) -> list[str]:
    found = socket.getaddrinfo(hostname.strip("[]"), None)
    return [str(place[0]) for *_, place in found]


def _addresses(hostname: str) -> set[str]:
    try:
        return set(_resolved(hostname))
    except (OSError, UnicodeError):
        return set()


def _own_addresses() -> dict[str, str]:
    """This machine's addresses, each with its network interface."""
    return {
        each.address.partition("%")[0]: name  # an IPv6 address may have a scope
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
    }
