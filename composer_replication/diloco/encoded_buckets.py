"""Values of one bucket on their way between the groups, encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from composer_replication.diloco.torchft_boundary import DiLoCoManager
from composer_replication.diloco.wire import WireFormat
from composer_replication.diloco.wire_sizes import PART

WEIGHT = 4
"""Bytes before each part: the contribution of the group that sends it, in fp32."""


class EncodedBucket(ABC):
    """What becomes of one bucket: encoded and sent, then known to all groups in the same bits.

    Args:
        values: 1-D fp32, a slice of what is averaged; the mean is written into it.
        parts: Into how many equal parts it is cut.
        wire_format: How parts travel.
    """

    total = 0.0
    """The sum of all contributions, once it has been received."""
    num_bytes = 0
    """What it takes: of k groups each sends 2 (k - 1) / k of it to the others."""

    def __init__(self, values: Tensor, parts: int, wire_format: WireFormat) -> None:
        self.values = values
        self._format = wire_format
        self._size = max(1, -(-values.numel() // (parts * PART))) * PART
        self._part_bytes = wire_format.num_bytes(self._size)

    @abstractmethod
    def start(self, manager: DiLoCoManager, contribution: float) -> Any:
        """Encode and send it: a Work."""

    @abstractmethod
    def follow(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        """Once that Work has ended well: another one to wait for, or None.

        Args:
            manager: As before.
            keeps_error: Whether ``write_error`` will be called.
        """

    @abstractmethod
    def write_error(self, into: Tensor) -> None:
        """Write what has been rounded away, once all has ended well and before ``write_mean``."""

    @abstractmethod
    def write_mean(self) -> None:
        """Write the mean into ``values``."""

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.values.device)

    def _part(self, values: Tensor, place: int) -> Tensor:
        return values[place * self._size : (place + 1) * self._size]

    def _encode(self, part: Tensor, into: Tensor) -> None:
        missing = self._size - part.numel()
        padded = torch.nn.functional.pad(part, (0, missing)) if missing else part
        self._format.encode(padded, into)

    def _decode(self, encoded: Tensor, into: Tensor) -> None:
        if into.numel() == self._size:
            self._format.decode(encoded, into)
        elif into.numel():
            padded = into.new_empty(self._size)
            self._format.decode(encoded, padded)
            into.copy_(padded[: into.numel()])


class SharedBucket(EncodedBucket):
    """Between two groups, or in one alone: each gets what the other has, and both take the mean.

    As many bytes as in parts that are summed here and there, and rounded once instead of twice.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        super().__init__(values, 1, wire_format)
        del rank  # both do the same
        self._groups = groups
        self._sent = self._bytes(WEIGHT + self._part_bytes)
        self._gathered = self._bytes(groups * (WEIGHT + self._part_bytes))
        self.num_bytes = self._sent.numel()

    def start(self, manager: DiLoCoManager, contribution: float) -> Any:
        self._sent[:WEIGHT].view(torch.float32).fill_(contribution)
        self._encode(self.values, self._sent[WEIGHT:])
        return manager.all_gather(self._gathered, self._sent)

    def follow(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        del manager, keeps_error
        self._messages = self._gathered.chunk(self._groups)
        self._weights = weights_of(self._messages)
        self.total = sum(self._weights)

    def write_error(self, into: Tensor) -> None:
        self._decode(self._sent[WEIGHT:], into)
        torch.sub(self.values, into, out=into)

    def write_mean(self) -> None:
        decoded = torch.empty_like(self.values)
        self.values.zero_()
        for weight, message in zip(self._weights, self._messages, strict=True):
            if weight:
                self._decode(message[WEIGHT:], decoded)
                self.values.add_(decoded, alpha=weight / self.total)


class ScatteredBucket(EncodedBucket):
    """Between more groups: each sums one part of it, and sends the mean to all.

    Of its own values of that part, which do not travel, nothing is rounded.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        super().__init__(values, groups, wire_format)
        self._groups, self._rank = groups, rank
        self._sent = self._bytes(groups * (WEIGHT + self._part_bytes))
        self._received = torch.empty_like(self._sent)
        self._own = self._bytes(self._part_bytes)
        self._gathered = self._bytes(groups * self._part_bytes)
        self.num_bytes = (self._sent.numel() + self._gathered.numel()) // 2

    def start(self, manager: DiLoCoManager, contribution: float) -> Any:
        for place, message in enumerate(self._sent.chunk(self._groups)):
            message[:WEIGHT].view(torch.float32).fill_(contribution)
            if place == self._rank:
                message[WEIGHT:] = 0
            else:
                self._encode(self._part(self.values, place), message[WEIGHT:])
        return manager.all_to_all(self._received, self._sent)

    def follow(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        messages = self._received.chunk(self._groups)
        weights = weights_of(messages)
        self.total = sum(weights)
        exact = self._part(self.values, self._rank)
        mean = torch.zeros(self._size, device=self.values.device)
        decoded = torch.empty_like(mean)
        for place, (weight, message) in enumerate(zip(weights, messages, strict=True)):
            if weight and place == self._rank:
                mean[: exact.numel()].add_(exact, alpha=weight / self.total)
            elif weight:
                self._format.decode(message[WEIGHT:], decoded)
                mean.add_(decoded, alpha=weight / self.total)
        self._format.encode(mean, self._own)
        if keeps_error:
            # It counts by this group's part of the mean when it comes with the next one.
            self._format.decode(self._own, decoded)
            error = mean.sub_(decoded).mul_(self.total / weights[self._rank])
            exact.copy_(error[: exact.numel()])
        return manager.all_gather(self._gathered, self._own)

    def write_error(self, into: Tensor) -> None:
        for place, message in enumerate(self._sent.chunk(self._groups)):
            part, kept = self._part(self.values, place), self._part(into, place)
            if place == self._rank:
                kept.copy_(part)
            else:
                self._decode(message[WEIGHT:], kept)
                torch.sub(part, kept, out=kept)

    def write_mean(self) -> None:
        for place, encoded in enumerate(self._gathered.chunk(self._groups)):
            self._decode(encoded, self._part(self.values, place))


def weights_of(messages: tuple[Tensor, ...]) -> list[float]:
    """The contributions of the groups, in their order."""
    return [float(message[:WEIGHT].view(torch.float32)) for message in messages]
