"""How evenly bytes pass over a link: the kernel's counters, read many times in a round.

A process of its own reads them inside a namespace, started by ``LineMeter`` as
``python -m benchmarks.slow_links.line_meter FD``. It counts behind the shaper (tbf), so on links
without a delay it sees what is on the line. Where ``relay.py`` delays a link it does not.
"""

from __future__ import annotations

import bisect
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from .links import Endpoint, Network

ANSWER_WITHIN_S = 30.0


@dataclass(frozen=True)
class LineSamples:
    """How many bytes had passed at several times.

    Attributes:
        times: When the counters were read, in seconds, ascending.
        sent: Bytes that this end had sent by then.
        received: Bytes that it had received.
    """

    times: list[float]
    sent: list[int]
    received: list[int]

    def peak_over_mean(self, window_s: float) -> float:
        """Return the highest rate in a window of so many seconds, over the rate of all samples.

        Of the two directions it is the larger one. A window begins at any sample; between two
        samples the rate is taken to be constant.
        """
        return max(self._peak(count, window_s) / self._mean(count) for count in self._counts())

    def _counts(self) -> tuple[list[int], list[int]]:
        return self.sent, self.received

    def _mean(self, count: list[int]) -> float:
        return (count[-1] - count[0]) / (self.times[-1] - self.times[0])

    def _peak(self, count: list[int], window_s: float) -> float:
        pairs = [
            (self._at(count, begin + window_s), at_begin)
            for begin, at_begin in zip(self.times, count, strict=True)
            if begin + window_s <= self.times[-1]
        ]
        if not pairs:
            raise ValueError(
                f"window_s={window_s}: the samples are of {self.times[-1] - self.times[0]:.3g} s"
            )
        return max(at_end - at_begin for at_end, at_begin in pairs) / window_s

    def _at(self, count: list[int], when: float) -> float:
        """The bytes at a time from the second sample to the last one."""
        after = bisect.bisect_left(self.times, when)
        begin, end = self.times[after - 1], self.times[after]
        part = (when - begin) / (end - begin)
        return count[after - 1] + part * (count[after] - count[after - 1])


class LineMeter:
    """Reads the counters of end 0 of a link.

    A context manager; its process ends with it.

    Args:
        network: Where the link is.
        log: Takes what the process says.
    """

    def __init__(self, network: Network, log: IO[str]) -> None:
        ours, theirs = Pipe()
        self._end: Connection[Any, Any] = ours
        command = [sys.executable, "-m", f"{__package__}.line_meter", str(theirs.fileno())]
        self._process: subprocess.Popen[str] = network.start(0, command, theirs.fileno(), log)
        theirs.close()

    def __enter__(self) -> LineMeter:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def start(self, end: Endpoint, interval_s: float) -> None:
        """Read the counters every so many seconds from now on."""
        self._end.send((end.device, interval_s))

    def stop(self) -> LineSamples:
        """Return what has been read since the start.

        Raises:
            RuntimeError: The process does not answer.
        """
        self._end.send(None)
        if not self._end.poll(ANSWER_WITHIN_S):
            raise RuntimeError(f"the line's meter has not answered for {ANSWER_WITHIN_S:.0f} s")
        return LineSamples(*self._end.recv())


def read_until_asked(connection: Connection[Any, Any], device: str, interval_s: float) -> None:
    """Read the counters of a device until something arrives, and send what was read."""
    folder = Path(f"/sys/class/net/{device}/statistics")
    times: list[float] = []
    sent: list[int] = []
    received: list[int] = []
    due, is_asked = time.monotonic(), False
    while True:
        times.append(time.monotonic())
        sent.append(int((folder / "tx_bytes").read_text()))
        received.append(int((folder / "rx_bytes").read_text()))
        if is_asked:
            break  # the last reading is from after the question
        due = max(due + interval_s, times[-1])
        is_asked = connection.poll(max(0.0, due - time.monotonic()))
    connection.recv()
    connection.send((times, sent, received))


def serve(fd: int) -> None:
    """Read whenever asked, until the other end is closed."""
    connection: Connection[Any, Any] = Connection(fd)
    while True:
        try:
            read_until_asked(connection, *connection.recv())
        except EOFError:
            return


if __name__ == "__main__":
    os.nice(-10)  # a reading that is late would hide a peak
    serve(int(sys.argv[1]))
