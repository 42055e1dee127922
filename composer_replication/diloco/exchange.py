"""One sync's messages in a wire format: to whom they go, and who sums them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchft.utils import get_stream_context

from composer_replication.diloco.torchft_boundary import DiLoCoManager
from composer_replication.diloco.wire import WireFormat
from composer_replication.diloco.wire_sizes import PART

WEIGHT = 4
"""Bytes before each part: the contribution of the group that sends it, in fp32."""


class EncodedBucket:
    """Values of one bucket on their way, in one part for each group.

    Args:
        values: 1-D fp32, a slice of what is averaged; the mean is written into it.
        groups: How many there are.
        rank: Which of them this one is; it sums the part of that number.
        wire_format: How parts travel.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        self.values = values
        self._groups, self._rank, self._format = groups, rank, wire_format
        self._size = max(1, -(-values.numel() // (groups * PART))) * PART
        self._part_bytes = wire_format.num_bytes(self._size)
        num_bytes = groups * self._part_bytes
        self.num_bytes = num_bytes + groups * WEIGHT // 2
        """What it takes, on the mean of the way there and the way back."""
        self._sent = self._bytes(num_bytes + groups * WEIGHT)
        self.received = torch.empty_like(self._sent)
        self.own = self._bytes(self._part_bytes)
        self.gathered = self._bytes(num_bytes)

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.values.device)

    def encode(self, contribution: float) -> Tensor:
        """What is sent to all groups, this one included."""
        for place, message in enumerate(self._sent.chunk(self._groups)):
            message[:WEIGHT].view(torch.float32).fill_(contribution)
            part = self._part(self.values, place)
            missing = self._size - part.numel()
            padded = torch.nn.functional.pad(part, (0, missing)) if missing else part
            self._format.encode(padded, message[WEIGHT:])
        return self._sent

    def reduce(self, keeps_error: bool) -> float:
        """Sum what has been received, weighted, and encode the mean into ``own``.

        The part of ``values`` that this group sums then holds what is to be kept of it, if
        ``keeps_error``.

        Returns:
            The sum of all contributions. With 0 there is no mean.
        """
        messages = self.received.chunk(self._groups)
        weights = [float(message[:WEIGHT].view(torch.float32)) for message in messages]
        mean = torch.zeros(self._size, device=self.values.device)
        decoded = torch.empty_like(mean)
        total = sum(weights)
        for weight, message in zip(weights, messages, strict=True):
            if weight:  # in the order of the groups, for the same bits whoever sums
                self._format.decode(message[WEIGHT:], decoded)
                mean.add_(decoded, alpha=weight / total)
        self._format.encode(mean, self.own)
        if keeps_error:
            self._keep_error(mean, decoded, total / weights[self._rank])
        return total

    def _keep_error(self, mean: Tensor, decoded: Tensor, factor: float) -> None:
        part = self._part(self.values, self._rank)
        self._format.decode(self.own, decoded)
        error = mean.sub_(decoded).mul_(factor)
        self._format.decode(self._sent.chunk(self._groups)[self._rank][WEIGHT:], decoded)
        part.add_(error.sub_(decoded)[: part.numel()])

    def write_error(self, into: Tensor) -> None:
        """Write what has been rounded away, once it has been reduced and before ``write_mean``."""
        for place, message in enumerate(self._sent.chunk(self._groups)):
            part, kept = self._part(self.values, place), self._part(into, place)
            if place == self._rank:
                kept.copy_(part)
            else:
                self._decode(message[WEIGHT:], kept)
                torch.sub(part, kept, out=kept)

    def write_mean(self) -> None:
        """Write what has been gathered into ``values``."""
        for place, encoded in enumerate(self.gathered.chunk(self._groups)):
            self._decode(encoded, self._part(self.values, place))

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        if into.numel() == self._size:
            self._format.decode(encoded, into)
        elif into.numel():
            padded = into.new_empty(self._size)
            self._format.decode(encoded, padded)
            into.copy_(padded[: into.numel()])

    def _part(self, values: Tensor, place: int) -> Tensor:
        return values[place * self._size : (place + 1) * self._size]


class _PeerFailed(Exception):
    """A message has not come; the manager knows why."""


class Exchange:
    """The messages of one sync, started; a Work to be waited for.

    What there is to do between the first and the second message of a bucket is done on a thread, so
    that training goes on meanwhile. The groups' collectives have to be in the same order: the
    caller starts no other before this one has been waited for.

    Args:
        manager: The torchft manager, or its simulated double.
        buckets: In the order that all groups share.
        contribution: Of this group. With 0 its values are zeros.
        keeps_error: Whether the buckets are to tell what has been rounded away.
    """

    def __init__(
        self,
        manager: DiLoCoManager,
        buckets: Sequence[EncodedBucket],
        contribution: float,
        keeps_error: bool,
    ) -> None:
        self.buckets = buckets
        self.total = 0.0
        self._manager = manager
        self._keeps_error = keeps_error and contribution > 0
        available = torch.accelerator.is_available()
        self._stream = torch.accelerator.current_stream() if available else None
        self._works = []
        with torch.no_grad():
            for bucket in buckets:
                sent = bucket.encode(contribution)
                self._works.append(manager.all_to_all(bucket.received, sent))
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad(), get_stream_context(self._stream):
                gathers = [
                    self._reduce(bucket, work)
                    for bucket, work in zip(self.buckets, self._works, strict=True)
                ]
                for work in gathers:
                    work.wait()
        except _PeerFailed:
            pass
        except Exception as error:
            self._manager.report_error(error)

    def _reduce(self, bucket: EncodedBucket, work: Any) -> Any:
        work.wait()
        if self._manager.errored():
            raise _PeerFailed
        self.total = bucket.reduce(self._keeps_error)
        return self._manager.all_gather(bucket.gathered, bucket.own)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the last message. Errors have gone to the manager."""
        del timeout  # the manager's
        self._thread.join()
        return True
