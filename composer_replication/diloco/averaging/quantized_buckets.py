"""Values of one bucket on their way between the groups, encoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_formats import WireFormat
from composer_replication.diloco.averaging.wire_sizes import FRAME, PART
from composer_replication.diloco.torchft_api import DiLoCoManager

WEIGHT = 4
"""Bytes before each part: the contribution of the group that sends it, in fp32."""


class Frame(NamedTuple):
    """Elements of a part that are encoded by themselves, and where their bytes are in it."""

    elements: slice
    encoded: slice
    size: int


class EncodedBucket(ABC):
    """What becomes of one bucket: encoded and sent, then known to all groups in the same bits.

    Each part is encoded in frames, so that on a CPU what is written is still in cache when it is
    read again. All groups of a run have the same kind of device, and so the same frames.

    Args:
        values: 1-D fp32, a slice of what is averaged; the mean is written into it.
        parts: Into how many equal parts it is cut.
        wire_format: How parts travel.
    """

    total = 0.0
    """The sum of all contributions, once it has been received."""
    num_bytes = 0
    """What it takes: of k groups each sends 2 (k - 1) / k of it to the others."""
    memory_bytes = 0
    """What its messages need."""

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
    def start(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        """Encode and send it: a Work. ``memory`` has ``memory_bytes`` of uint8."""

    @abstractmethod
    def follow(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        """Once that Work has ended well: another one to wait for, or None.

        Args:
            manager: As before.
            keeps_error: Whether ``finish`` will be asked for the error.
        """

    @abstractmethod
    def finish(self, error: Tensor | None) -> None:
        """Once all has ended well: write the mean into ``values``.

        Args:
            error: Where to write what has been rounded away, if that is kept.
        """

    def _part(self, values: Tensor, place: int) -> Tensor:
        return values[place * self._size : (place + 1) * self._size]

    def _encode(self, part: Tensor, into: Tensor) -> None:
        """A part of the values; the last ones may be short of elements."""
        for frame in self._frames:
            values = part[frame.elements]
            missing = frame.size - values.numel()
            padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
            self._format.encode(padded, into[frame.encoded])

    def _decode(self, part: Tensor, frame: Frame, into: Tensor) -> Tensor:
        """A frame of an encoded part."""
        self._format.decode(part[frame.encoded], into[: frame.size])
        return into[: frame.size]

    def _scratch(self) -> Tensor:
        return torch.empty(self._frames[0].size, device=self.values.device)


class SharedBucket(EncodedBucket):
    """Between two groups, or in one alone: each gets what the other has, and both take the mean.

    As many bytes as in parts that are summed here and there, and rounded once instead of twice.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        super().__init__(values, 1, wire_format)
        self._groups, self._rank = groups, rank
        self.num_bytes = WEIGHT + self._part_bytes
        self.memory_bytes = (1 + groups) * self.num_bytes

    def start(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        self._sent, gathered = memory[: self.num_bytes], memory[self.num_bytes :]
        self._messages = gathered.chunk(self._groups)
        self._sent[:WEIGHT].view(torch.float32).fill_(contribution)
        self._encode(self.values, self._sent[WEIGHT:])
        return manager.all_gather(gathered, self._sent)

    def follow(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        del manager, keeps_error
        self._weights = weights_of(self._messages)
        self.total = sum(self._weights)

    def finish(self, error: Tensor | None) -> None:
        scratch, own_scratch = self._scratch(), self._scratch()
        for frame in self._frames:
            values = self.values[frame.elements]
            own = self._decode(self._sent[WEIGHT:], frame, own_scratch)[: values.numel()]
            if error is not None:
                torch.sub(values, own, out=error[frame.elements])
            values.zero_()
            for group, (weight, message) in enumerate(
                zip(self._weights, self._messages, strict=True)
            ):
                if weight and group == self._rank:
                    values.add_(own, alpha=weight / self.total)
                elif weight:
                    decoded = self._decode(message[WEIGHT:], frame, scratch)[: values.numel()]
                    values.add_(decoded, alpha=weight / self.total)


class ScatteredBucket(EncodedBucket):
    """Between more groups: each sums one part of it, and sends the mean to all.

    Of its own values of that part, which do not travel, nothing is rounded.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        super().__init__(values, groups, wire_format)
        self._groups, self._rank = groups, rank
        to_all, means = groups * (WEIGHT + self._part_bytes), groups * self._part_bytes
        self._memory_sizes = [to_all, to_all, means, self._part_bytes]
        self.memory_bytes = sum(self._memory_sizes)
        self.num_bytes = (to_all + means) // 2

    def start(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        sent, received, self._gathered, self._own = memory.split(self._memory_sizes)
        self._sent, self._received = sent.chunk(self._groups), received.chunk(self._groups)
        for place, message in enumerate(self._sent):
            message[:WEIGHT].view(torch.float32).fill_(contribution)
            if place == self._rank:
                message[WEIGHT:] = 0
            else:
                self._encode(self._part(self.values, place), message[WEIGHT:])
        return manager.all_to_all(received, sent)

    def follow(self, manager: DiLoCoManager, keeps_error: bool) -> Any:
        weights = weights_of(self._received)
        self.total = sum(weights)
        mean, decoded = self._scratch(), self._scratch()
        for frame in self._frames:
            exact = self._part(self.values, self._rank)[frame.elements]
            mean.zero_()
            for place, (weight, message) in enumerate(zip(weights, self._received, strict=True)):
                if weight and place == self._rank:
                    mean[: exact.numel()].add_(exact, alpha=weight / self.total)
                elif weight:
                    part = self._decode(message[WEIGHT:], frame, decoded)
                    mean[: frame.size].add_(part, alpha=weight / self.total)
            self._format.encode(mean[: frame.size], self._own[frame.encoded])
            if keeps_error:
                # It counts by this group's part of the mean when it comes with the next one.
                rounded = self._decode(self._own, frame, decoded)[: exact.numel()]
                torch.sub(mean[: exact.numel()], rounded, out=exact)
                exact.mul_(self.total / weights[self._rank])
        return manager.all_gather(self._gathered, self._own)

    def finish(self, error: Tensor | None) -> None:
        scratch = self._scratch()
        for place, (message, gathered) in enumerate(
            zip(self._sent, self._gathered.chunk(self._groups), strict=True)
        ):
            for frame in self._frames:
                values = self._part(self.values, place)[frame.elements]
                if error is not None:
                    kept = self._part(error, place)[frame.elements]
                    if place == self._rank:
                        kept.copy_(values)
                    else:
                        sent = self._decode(message[WEIGHT:], frame, scratch)
                        torch.sub(values, sent[: values.numel()], out=kept)
                values.copy_(self._decode(gathered, frame, scratch)[: values.numel()])


def weights_of(messages: tuple[Tensor, ...]) -> list[float]:
    """The contributions of the groups, in their order."""
    return [float(message[:WEIGHT].view(torch.float32)) for message in messages]
