"""Checks of the network: this machine's name, the ways to others and back, the clock."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import psutil

from composer_replication.launch.doctor.results import (
    Result,
    failure,
    from_error,
    ok,
    skipped,
    warning,
)
from composer_replication.replica.addresses import interface_of, is_loopback, listen, own_address
from composer_replication.replica.lighthouse import LighthouseStatus, can_connect, check_lighthouse

CONNECT_TIMEOUT_S = 3.0
SKEW_S = 1.0


def check_name(hostname: str, is_given: bool, reaches_others: bool | None) -> Iterator[Result]:
    """The name that this machine advertises is its own, and no loopback address.

    Args:
        hostname: The name.
        is_given: Whether it was set, and is not just the host name.
        reaches_others: Whether coordinator or lighthouse are beyond loopback; None: none is named.
    """
    fix = "export COMPOSER_REPLICATION_HOSTNAME=... to a name or address that the others reach"
    try:
        address = own_address(hostname)
        interface = interface_of(hostname)
    except ValueError as error:
        yield failure("name", from_error("name", error).value, fix)
        return
    if is_loopback(hostname):
        value = f"{hostname} is a loopback address here"
        if reaches_others:
            yield failure("name", f"{value}: the others would look on their own machines", fix)
        elif reaches_others is None:
            yield warning("name", f"{value}, which is enough on one machine alone", fix)
        else:
            yield ok("name", f"{value}, as the coordinator's is")
    elif address is None:
        yield warning(
            "name",
            f"{hostname} is no address of this machine (NAT, or a container?): groups listen on "
            "every interface",
            fix,
        )
    else:
        source = "" if is_given else ", its host name"
        yield ok("name", f"{hostname}{source}, is {address} on {interface}")


def check_interfaces(
    name_leads_to: str | None, way_out: str | None, environ: Mapping[str, str]
) -> Iterator[Result]:
    """The name's interface is the one that leads to the coordinator, and what gloo and NCCL use.

    Args:
        name_leads_to: The interface of the advertised name.
        way_out: The interface from which this machine reaches the coordinator.
        environ: Environment variables.
    """
    if name_leads_to is None:
        return
    if way_out is not None and way_out not in (name_leads_to, "lo"):
        yield warning(
            "interface",
            f"the name leads to {name_leads_to}, and the way to the coordinator is {way_out}",
            "export COMPOSER_REPLICATION_HOSTNAME=... to this machine's address on the network "
            "that the groups share",
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = environ.get(variable)
        if named and not any(name_leads_to.startswith(each) for each in named.split(",")):
            yield warning(
                variable,
                f"{named}, and the name leads to {name_leads_to}",
                f"unset {variable}, or set both to one network",
            )
    stats = psutil.net_if_stats().get(name_leads_to)
    if stats is not None:
        speed = f"{stats.speed} Mbit/s" if stats.speed > 0 else "a speed that it does not say"
        yield ok("interface", f"{name_leads_to}, {speed}, MTU {stats.mtu}")


def way_to(address: str) -> str | None:
    """The interface by which packets to an ``http://host:port`` leave; None if there is no way."""
    parts = urlsplit(address)
    with suppress(OSError, ValueError):
        info = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])  # of a datagram socket: it looks up the route, and sends nothing
            return interface_of(probe.getsockname()[0])
    return None


def check_lighthouse_port(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> Iterator[Result]:
    """The lighthouse's port can be reached from here."""
    try:
        check_lighthouse(address, timeout_s)
    except ValueError as error:
        yield from_error("lighthouse", error)
    except OSError as error:
        yield failure(
            "lighthouse",
            str(error).partition(". ")[0],
            "open this port of the coordinator's machine to this one, or correct the address",
        )
    else:
        yield ok("lighthouse", f"{address} can be reached")


def check_peers(status: LighthouseStatus, timeout_s: float = CONNECT_TIMEOUT_S) -> Iterator[Result]:
    """The managers of the groups in training can be reached from here."""
    alive = [member for member in status.members if member.replica_id in status.alive]
    if not alive:
        yield skipped("peers", "no replica group is in training")
        return

    def reaches(address: str) -> bool:
        parts = urlsplit(address)
        return can_connect(parts.hostname or "", parts.port or 80, timeout_s)

    with ThreadPoolExecutor(min(16, len(alive))) as pool:
        reached = list(pool.map(reaches, (member.manager_addr for member in alive)))
    for member, does in zip(alive, reached, strict=True):
        name = member.replica_id.partition(":")[0]
        if does:
            yield ok("peers", f"replica group {name} at {member.manager_addr} can be reached")
        else:
            yield failure(
                "peers",
                f"replica group {name} at {member.manager_addr} cannot be reached from here",
                "let the machines of the run reach each other on all ports (docs/security.md)",
            )


@contextmanager
def answering(listening: socket.socket, proof: str) -> Iterator[int]:
    """Answer every connection to a socket with a proof, and yield the socket's port."""

    def serve() -> None:
        with suppress(OSError):  # the socket is closed at the end
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    connection.sendall(proof.encode())

    threading.Thread(target=serve, name="doctor", daemon=True).start()
    with listening:
        yield listening.getsockname()[1]
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # close alone does not wake accept


def check_way_back(
    hostname: str, is_given: bool, why_unreached: Callable[[str, int, str], str]
) -> Iterator[Result]:
    """The coordinator can connect to this machine under its name, at a port that the system picks.

    Args:
        hostname: The name that this machine advertises.
        is_given: Whether it was set; groups listen on its address then.
        why_unreached: Asks the coordinator to connect to a name and port, and to read a proof.

    Raises:
        ValueError: The coordinator rejects.
        ConnectionError: It does not answer.
    """
    proof = secrets.token_hex(16)
    with answering(listen(hostname if is_given else None), proof) as port:
        problem = why_unreached(hostname, port, proof)
    if problem:
        yield failure(
            "way back",
            problem,
            "export COMPOSER_REPLICATION_HOSTNAME=... to the address under which the others reach "
            "this machine, and open its ports to them (docs/security.md)",
        )
    else:
        yield ok("way back", f"the coordinator reaches {hostname}, port {port}")


def check_clock(clock: Callable[[], tuple[float, str | None]]) -> Iterator[Result]:
    """This machine's clock agrees with the coordinator's, by the quickest of a few answers.

    Args:
        clock: Asks the coordinator for its time.
    """
    skews = []
    for _ in range(5):
        sent, began = time.time(), time.monotonic()
        theirs, _ = clock()
        took = time.monotonic() - began
        skews.append((took, sent + took / 2 - theirs))
    took, skew = min(skews)
    value = f"{abs(skew):.2g} s {'ahead of' if skew > 0 else 'behind'} the coordinator's"
    if abs(skew) > SKEW_S + took / 2:
        yield warning(
            "clock",
            f"{value}: lines of logs do not fit together, and new certificates may not be valid",
            "let a time service set both clocks (timedatectl set-ntp true)",
        )
    else:
        yield ok("clock", value)
