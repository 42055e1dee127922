"""The pair of replica groups of ``bandwidth.py``, and their visits to each other over a link."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from .group_commands import (
    BytesSent,
    Failed,
    Join,
    Leave,
    Method,
    Probe,
    Round,
    Steps,
    Taken,
    TimeSteps,
)
from .links import Link, Network

ANSWER_WITHIN_S = 600.0

_FIRST_PORT = 29500


@dataclass(frozen=True)
class RoundTaken:
    """What a round took both groups.

    Attributes:
        steps: Inner steps in it.
        seconds: Of the whole round, in the slower group.
        bytes_sent: Of one group, as the kernel counts them on its device, with headers and all.
        sync_s: How long training stood still for syncs, in seconds, in the group that came to them
            last: the other one's wait is no part of them.
        awake_s: Of the round less each group's wait for the other, in the slower group.
    """

    steps: int
    seconds: float
    bytes_sent: float
    sync_s: float
    awake_s: float

    @property
    def step_s(self) -> float:
        """Seconds a step, communication included if there was any."""
        return self.seconds / self.steps

    def scaled(self, steps: int) -> RoundTaken:
        """What so many steps would take."""
        ratio = steps / self.steps
        seconds, bytes_sent = ratio * self.seconds, ratio * self.bytes_sent
        return RoundTaken(steps, seconds, bytes_sent, self.sync_s, ratio * self.awake_s)


class Pair:
    """The two groups, one process each.

    A context manager; the processes end with it.

    Args:
        network: Where they live.
        params: Parameters of the model, about; afterwards, how many there are.
    """

    def __init__(self, network: Network, params: int) -> None:
        self.params = params
        self._network = network
        self._ends: list[Connection[Any, Any]] = []
        self._stack = ExitStack()
        self._port = _FIRST_PORT
        self._method: Method | None = None

    def __enter__(self) -> Pair:
        try:
            self._log = self._stack.enter_context(tempfile.TemporaryFile("w+"))
            for rank in range(2):
                self._start(rank)
            self.params = self._answers()[0]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        self._ends.append(ours)
        arguments = map(str, (rank, self.params, theirs.fileno()))
        command = [sys.executable, "-m", f"{__package__}.shaped_group", *arguments]
        process = self._network.start(rank, command, theirs.fileno(), self._log)
        theirs.close()
        self._stack.callback(_end, process)

    def ask(self, *commands: object) -> list[Any]:
        """Give both groups a command, the same one or one each, and wait for both answers.

        Raises:
            RuntimeError: A group failed or ended, or was too slow.
        """
        for end, command in zip(self._ends, (commands[0], commands[-1]), strict=True):
            end.send(command)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, end in enumerate(self._ends):
            if not end.poll(ANSWER_WITHIN_S):
                raise RuntimeError(
                    f"group {rank} has not answered for {ANSWER_WITHIN_S:.0f} s: take a faster "
                    f"link or fewer parameters\n{self._said()}"
                )
            try:
                answers.append(end.recv())
            except EOFError as error:
                raise RuntimeError(f"group {rank} has ended:\n{self._said()}") from error
        for rank, answer in enumerate(answers):
            if isinstance(answer, Failed):
                raise RuntimeError(f"group {rank} failed: {answer.traceback}\n{self._said()}")
        return answers

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-3000:]

    def probe(self, link: Link) -> tuple[float, float]:
        """What a link gives: bits of payload a second, and a round trip in seconds."""
        self._network.shape(link)
        seconds = 1.0 + 10 * link.round_trip_s
        num_bytes = round(min(max(link.bits_per_s / 8 * seconds, 4e6), 4e8))
        ends = (self._network.endpoint(link, side) for side in range(2))
        round_trip_s, bits_per_s = self.ask(*(Probe(end, num_bytes) for end in ends))
        return bits_per_s, round_trip_s

    def join(self, link: Link, method: Method) -> None:
        """Begin a visit, with a round that allocates. Until then the link has any rate, to save
        time; but where there is a delay that round also opens TCP's windows, at the link's own."""
        self._port += 1
        self._method = method
        self._network.shape(link, limited=False)
        ends = (self._network.endpoint(link, side) for side in range(2))
        self.ask(*(Join(end, self._port, method) for end in ends))
        if link.delay_s:
            self._network.shape(link)
        self.round(trains=False)
        self._network.shape(link)

    def leave(self) -> None:
        """End the visit."""
        self.ask(Leave())

    def reshape(self, link: Link) -> None:
        """Change the link of the visit under way."""
        self._network.shape(link)

    def steps(self, count: int) -> RoundTaken:
        """Inner steps without communication."""
        return self._measure(Steps(count))

    def round(self, *, trains: bool = True) -> RoundTaken:
        """One round, see ``Round``; of DDP what it would take."""
        assert self._method is not None, "joined"
        return self._measure(Round(trains)).scaled(self._method.sync_every)

    def _measure(self, command: object) -> RoundTaken:
        before = sum(self.ask(BytesSent()))
        taken: list[Taken] = self.ask(command)
        # Only now has each group sent what the other one waited for.
        sent = sum(self.ask(BytesSent())) - before
        seconds, sync_s = max(t.seconds for t in taken), min(t.sync_s for t in taken)
        awake_s = max(t.seconds - t.waited_s for t in taken)
        return RoundTaken(taken[0].steps, seconds, sent / len(taken), sync_s, awake_s)

    def find_batch(self, step_s: float) -> int:
        """The batch size with which an inner step takes about so many seconds."""
        small, large = 16, 128
        times = [max(self.ask(TimeSteps(batch, 8))) for batch in (small, large)]
        a_sample = max((times[1] - times[0]) / (large - small), 1e-6)
        batch = max(4, round(small + (step_s - times[0]) / a_sample))
        self.ask(TimeSteps(batch, 2))
        return batch


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
