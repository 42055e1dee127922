"""The quantized messages of one bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_formats import WireFormat
from composer_replication.diloco.averaging.wire_sizes import FRAME, PART
from composer_replication.diloco.torchft_api import DiLoCoManager

WEIGHT = 4
"""Bytes before each part: the contribution of the sending group, in fp32."""


class Frame(NamedTuple):
    """Elements of a part that are encoded together, and the slice that their bytes take in it."""

    elements: slice
    encoded: slice
    size: int


class QuantizedBucket(ABC):
    """Encodes, sends and averages one bucket, bitwise identically in all groups.

    Each part is encoded in frames, so that on a CPU the values are still in cache when they are
    read again. All groups of a run have the same kind of device, and therefore the same frames.

    Args:
        values: 1-D fp32, a slice of what is averaged. ``finish`` writes the mean into it.
        parts: The number of equal parts that the bucket is cut into.
        wire_format: The format of each part.

    Attributes:
        total: The sum of all contributions, once the first messages have arrived.
        num_bytes: Size of the bucket on the network. Each of k groups sends 2 (k - 1) / k times
            this size to the others.
        memory_bytes: Size of the memory that ``start_first`` needs.
    """

    total = 0.0
    num_bytes = 0
    memory_bytes = 0

    def __init__(self, values: Tensor, parts: int, wire_format: WireFormat) -> None:
        self.values = values
        self._format = wire_format
        self._size = max(1, -(-values.numel() // (parts * PART))) * PART
        self._frames: list[Frame] = []
        self._part_bytes = 0
        step = FRAME if values.device.type == "cpu" else self._size
        for start in range(0, self._size, step):
            size = min(step, self._size - start)
            stop = self._part_bytes + wire_format.num_bytes(size)
            frame = Frame(slice(start, start + size), slice(self._part_bytes, stop), size)
            self._frames.append(frame)
            self._part_bytes = stop

    @abstractmethod
    def start_first(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        """Encode the values and start the first message.

        Args:
            manager: The torchft manager, or its simulated double.
            contribution: This group's weight in the mean.
            memory: uint8, of ``memory_bytes``.

        Returns:
            A Work to wait for.
        """

    @abstractmethod
    def start_second(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        """Average this group's part and start the second message, once the first has arrived.

        Args:
            manager: The manager that ``start_first`` got.
            keeps_error: Whether ``finish`` will be asked for the rounding error.

        Returns:
            A Work to wait for, or None if there is no second message.
        """

    @abstractmethod
    def _arrived(self) -> Sequence[Sequence[tuple[float, Tensor]]]:
        """What has arrived of the mean: encoded parts to be added up, each with its weight."""

    def mean_square(self) -> Tensor:
        """Return at least the square of the mean's norm, once all messages have arrived.

        The norms of what is added up are added up, which is what they may be at most.
        """
        scratch, square = self._scratch(), self.values.new_zeros(())
        for parts in self._arrived():
            for frame in self._frames:
                decoded = ((weight, self._decode(part, frame, scratch)) for weight, part in parts)
                norms = [weight * torch.dot(each, each).sqrt() for weight, each in decoded]
                square += torch.stack(norms).sum().square()
        return square

    @abstractmethod
    def finish(self, error: Tensor | None) -> None:
        """Write the mean into ``values``, once all messages have arrived.

        Args:
            error: Where to write this group's rounding error. None: it is not kept.
        """

    def _part(self, values: Tensor, index: int) -> Tensor:
        return values[index * self._size : (index + 1) * self._size]

    def _encode(self, part: Tensor, into: Tensor) -> None:
        """Encode a part of the values. The last parts may be shorter and are padded with zeros."""
        for frame in self._frames:
            values = part[frame.elements]
            missing = frame.size - values.numel()
            padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
            self._format.encode(padded, into[frame.encoded])

    def _decode(self, part: Tensor, frame: Frame, into: Tensor) -> Tensor:
        """Decode one frame of an encoded part."""
        self._format.decode(part[frame.encoded], into[: frame.size])
        return into[: frame.size]

    def _scratch(self) -> Tensor:
        return torch.empty(self._frames[0].size, device=self.values.device)


class AllGatherBucket(QuantizedBucket):
    """A bucket of one or two groups: both gather each other's values and compute the mean.

    That takes as many bytes as a reduce-scatter and an all-gather, and rounds once, not twice.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        super().__init__(values, 1, wire_format)
        self._groups, self._rank = groups, rank
        self.num_bytes = WEIGHT + self._part_bytes
        self.memory_bytes = (1 + groups) * self.num_bytes

    def start_first(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        self._sent, gathered = memory[: self.num_bytes], memory[self.num_bytes :]
        self._messages = gathered.chunk(self._groups)
        self._sent[:WEIGHT].view(torch.float32).fill_(contribution)
        self._encode(self.values, self._sent[WEIGHT:])
        return manager.all_gather(gathered, self._sent)

    def start_second(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        del manager, keeps_error
        self._contributions = weights_of(self._messages)
        self.total = sum(self._contributions)

    def _arrived(self) -> Sequence[Sequence[tuple[float, Tensor]]]:
        pairs = zip(self._contributions, self._messages, strict=True)
        return [[(weight / (self.total or 1.0), part[WEIGHT:]) for weight, part in pairs]]

    def finish(self, error: Tensor | None) -> None:
        scratch, own_scratch = self._scratch(), self._scratch()
        for frame in self._frames:
            values = self.values[frame.elements]
            own = self._decode(self._sent[WEIGHT:], frame, own_scratch)[: values.numel()]
            if error is not None:
                torch.sub(values, own, out=error[frame.elements])
            values.zero_()
            for group, (weight, message) in enumerate(
                zip(self._contributions, self._messages, strict=True)
            ):
                if not weight:
                    continue
                if group == self._rank:
                    decoded = own
                else:
                    decoded = self._decode(message[WEIGHT:], frame, scratch)
                values.add_(decoded[: values.numel()], alpha=weight / self.total)


class ReduceScatterBucket(QuantizedBucket):
    """A bucket of three or more groups: each averages one part and sends the mean to all.

    A group's own values of its own part are not sent, and therefore not rounded.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        super().__init__(values, groups, wire_format)
        self._groups, self._rank = groups, rank
        to_all, means = groups * (WEIGHT + self._part_bytes), groups * self._part_bytes
        self._memory_sizes = [to_all, to_all, means, self._part_bytes]
        self.memory_bytes = sum(self._memory_sizes)
        self.num_bytes = (to_all + means) // 2

    def start_first(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        sent, received, self._gathered, self._own = memory.split(self._memory_sizes)
        self._sent, self._received = sent.chunk(self._groups), received.chunk(self._groups)
        for rank, message in enumerate(self._sent):
            message[:WEIGHT].view(torch.float32).fill_(contribution)
            if rank == self._rank:
                message[WEIGHT:] = 0
            else:
                self._encode(self._part(self.values, rank), message[WEIGHT:])
        return manager.all_to_all(received, sent)

    def start_second(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        weights = weights_of(self._received)
        self.total = sum(weights)
        mean, decoded = self._scratch(), self._scratch()
        for frame in self._frames:
            exact = self._part(self.values, self._rank)[frame.elements]
            mean.zero_()
            for rank, (weight, message) in enumerate(zip(weights, self._received, strict=True)):
                if not weight:
                    continue
                part = exact
                if rank != self._rank:
                    part = self._decode(message[WEIGHT:], frame, decoded)
                mean[: exact.numel()].add_(part[: exact.numel()], alpha=weight / self.total)
            self._format.encode(mean[: frame.size], self._own[frame.encoded])
            # Without a weight here this group is not in the sum: the connections are those of
            # another quorum, as the peer table says to all.
            if keeps_error and weights[self._rank]:
                # The next sync weights this error by this group's share of the mean: undo that.
                rounded = self._decode(self._own, frame, decoded)[: exact.numel()]
                torch.sub(mean[: exact.numel()], rounded, out=exact)
                exact.mul_(self.total / weights[self._rank])
        return manager.all_gather(self._gathered, self._own)

    def _arrived(self) -> Sequence[Sequence[tuple[float, Tensor]]]:
        return [[(1.0, part)] for part in self._gathered.chunk(self._groups)]

    def finish(self, error: Tensor | None) -> None:
        scratch = self._scratch()
        for rank, (message, gathered) in enumerate(
            zip(self._sent, self._gathered.chunk(self._groups), strict=True)
        ):
            for frame in self._frames:
                values = self._part(self.values, rank)[frame.elements]
                if error is not None:
                    kept = self._part(error, rank)[frame.elements]
                    if rank == self._rank:
                        kept.copy_(values)
                    else:
                        sent = self._decode(message[WEIGHT:], frame, scratch)
                        torch.sub(values, sent[: values.numel()], out=kept)
                values.copy_(self._decode(gathered, frame, scratch)[: values.numel()])


def weights_of(messages: tuple[Tensor, ...]) -> list[float]:
    """Return the contributions of the groups, by rank."""
    return [float(message[:WEIGHT].view(torch.float32)) for message in messages]
