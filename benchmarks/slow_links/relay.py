"""A link with a delay, where the kernel has no netem: a process that passes packets on, later.

Started by ``links.py`` as ``python relay.py FD FD``, with the descriptors of two TUN devices. A
line on its standard input, ``BITS_PER_S DELAY_S``, says what it does with every packet from then
on; it ends when that input does. Packets come as the kernel hands them to a network card that cuts
them itself: up to 64 KiB, with a header that says into which segments. So few pass here, while TCP
at both ends works with segments of an Ethernet link.
"""

from __future__ import annotations

import os
import selectors
import struct
import sys
import time
from collections import deque

QUEUE_S = 0.25
"""How long a packet waits for the link at most, in seconds; what would wait longer is dropped."""

HEADER = struct.Struct("=BBHHHH")
"""``struct virtio_net_hdr``: flags, kind, length of the headers, segment size, two for the sum."""

LARGEST = 2**16 + HEADER.size


def bytes_on_link(packet: bytes) -> int:
    """Bytes of a packet once it has been cut into segments, each with headers of its own."""
    _, kind, headers, segment, _, _ = HEADER.unpack_from(packet)
    size = len(packet) - HEADER.size
    if not kind or not segment:
        return size
    segments = -(-(size - headers) // segment)
    return size + (segments - 1) * headers


class Direction:
    """One way through the link, first in first out.

    Args:
        source: Descriptor that packets are read from.
        sink: Descriptor that they are written to.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.waiting: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0

    def take(self, bits_per_s: float, delay_s: float) -> None:
        """Read what is there, and note when each packet is due at the other end."""
        while True:
            try:
                packet = os.read(self.source, LARGEST)
            except BlockingIOError:
                return
            now = time.monotonic()
            begins = max(now, self._free_at)
            if begins - now > QUEUE_S:
                continue
            self._free_at = begins + 8 * bytes_on_link(packet) / bits_per_s
            self.waiting.append((self._free_at + delay_s, packet))

    def deliver(self) -> float | None:
        """Write what is due. Seconds until the next one is; None if there is none."""
        while self.waiting:
            due_in = self.waiting[0][0] - time.monotonic()
            if due_in > 0:
                return due_in
            os.write(self.sink, self.waiting.popleft()[1])
        return None


def relay(first: int, second: int) -> None:
    """Pass packets on between two TUN devices until standard input ends."""
    bits_per_s, delay_s = 1e9, 0.0
    directions = Direction(first, second), Direction(second, first)
    selector = selectors.DefaultSelector()
    for direction in directions:
        os.set_blocking(direction.source, False)
        selector.register(direction.source, selectors.EVENT_READ, direction)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        due = [due_in for d in directions if (due_in := d.deliver()) is not None]
        for key, _ in selector.select(min(due, default=None)):
            if key.data is not None:
                key.data.take(bits_per_s, delay_s)
                continue
            told = os.read(sys.stdin.fileno(), 4096).split()
            if not told:
                return
            bits_per_s, delay_s = map(float, told[-2:])


if __name__ == "__main__":
    os.nice(-10)  # it stands for hardware, which does not wait for the groups to leave it a core
    relay(int(sys.argv[1]), int(sys.argv[2]))
