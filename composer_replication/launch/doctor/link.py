"""Measures the link to the coordinator, in place of the links between groups."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from composer_replication.launch.doctor.results import Result, ok, warning

if TYPE_CHECKING:
    from composer_replication.coordinator.client import CoordinatorClient

CONNECT_TIMEOUT_S = 3.0
SIZES = tuple(2**14 * 4**n for n in range(6))
"""Bytes that are sent to measure the link: 16 KiB to 16 MiB."""
LONG_ENOUGH_S = 0.4
"""A transfer that takes as long as this measures the link; a shorter one is repeated with more."""
SLOWEST_BITS_PER_S = 10e6
"""A slower link is warned of, whatever the model."""


@dataclass(frozen=True)
class Link:
    """A measured link: bits per second in each direction, and seconds of a round trip."""

    up: float
    down: float
    round_trip_s: float


def measure_link(client: CoordinatorClient, address: str) -> Link:
    """Measure the link to the coordinator, in a few seconds.

    Raises:
        ValueError: The coordinator rejects.
        OSError: It does not answer, or a transfer breaks off.
    """
    # A link that compresses would look faster with other bytes than random ones.
    content, trip_s = os.urandom(SIZES[-1]), round_trip(address)
    up = measured_rate(lambda size: client.send_bytes(content[:size]), trip_s)
    return Link(up, measured_rate(client.receive_bytes, trip_s), trip_s)


def round_trip(address: str) -> float:
    """Seconds of a round trip: the quickest of a few connections, which take one each.

    Raises:
        OSError: Nobody answers.
    """
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT_S).close()
        seconds.append(time.monotonic() - began)
    return min(seconds)


def measured_rate(transfer: Callable[[int], None], round_trip_s: float) -> float:
    """Bits per second of a link, by transfers that grow until one takes long enough.

    Args:
        transfer: Transfers so many bytes.
        round_trip_s: Seconds that a transfer takes beside its bytes.
    """
    rate = 0.0
    for size in SIZES:
        began = time.monotonic()
        transfer(size)
        took = time.monotonic() - began - round_trip_s
        rate = 8 * size / max(took, 1e-6)  # of the last one alone: the first ones hardly take any
        if took > LONG_ENOUGH_S:
            break
    return rate


def check_link(link: Link) -> Iterator[Result]:
    """The measured link; whether it is fast enough depends on the model, see ``check_round``."""
    value = (
        f"{_mbit(link.up)} Mbit/s to the coordinator, {_mbit(link.down)} from it, round trip "
        f"{1e3 * link.round_trip_s:.3g} ms"
    )
    if min(link.up, link.down) < SLOWEST_BITS_PER_S:
        fix = "look for a limit on the way; otherwise large sync_every and wire_format: fp4"
        yield warning("link", value, fix)
    else:
        yield ok("link", value)


def _mbit(bits_per_s: float) -> str:
    mbit = bits_per_s / 1e6
    return f"{mbit:,.0f}" if mbit >= 100 else f"{mbit:.3g}"
