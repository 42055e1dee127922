"""The quantized messages of one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_replication.diloco.averaging.wire_formats import WireFormat
from composer_replication.diloco.averaging.wire_sizes import FRAME, PART
from composer_replication.diloco.flat_chunks import Squares
from composer_replication.diloco.torchft_api import DiLoCoManager

WEIGHT = 4
"""Bytes before each part: the contribution of the sending group, in fp32."""


class Frame(NamedTuple):
    """Elements of a part that are encoded together, and the slice of its bytes that they take."""

    elements: slice
    encoded: slice
    size: int


class QuantizedBucket:
    """Encodes, sends and averages one bucket, bitwise identically in all groups.

    Of three or more groups each averages one part of it, and sends the mean to all. Its own values
    of that part are not sent, and therefore not rounded. One or two groups gather each other's
    values and compute the whole mean: that takes as many bytes, and rounds once instead of twice.

    Args:
        values: 1-D fp32, a slice of what is averaged. ``finish`` writes the mean into it.
        groups: How many groups are in the quorum.
        rank: The rank of this group in it.
        wire_format: The format of the messages.

    Attributes:
        has_means: Whether the groups send each other the means of parts.
        weights: The contributions of the groups, as ``start_second`` got them.
        num_bytes: Size of the bucket on the network. Each of k groups sends 2 (k - 1) / k times
            this size to the others.
        memory_bytes: Size of the memory that ``start_first`` needs.
    """

    def __init__(self, values: Tensor, groups: int, rank: int, wire_format: WireFormat) -> None:
        self.values = values
        self.weights: Sequence[float] = ()
        self._groups, self._rank, self._format = groups, rank, wire_format
        self.has_means = groups > 2
        parts = groups if self.has_means else 1
        self._size = max(1, -(-values.numel() // (parts * PART))) * PART
        self._frames: list[Frame] = []
        encoded = 0
        # On a CPU the values of a frame are still in cache when they are read again. All groups of
        # a run have the same kind of device, and therefore the same frames.
        step = FRAME if values.device.type == "cpu" else self._size
        for start in range(0, self._size, step):
            size = min(step, self._size - start)
            stop = encoded + wire_format.num_bytes(size)
            self._frames.append(Frame(slice(start, start + size), slice(encoded, stop), size))
            encoded = stop
        message = WEIGHT + encoded
        second = [groups * encoded, encoded] if self.has_means else []
        self._memory_sizes = [parts * message, groups * message, *second]
        self.memory_bytes = sum(self._memory_sizes)
        self.num_bytes = groups * (message + encoded) // 2 if self.has_means else message

    def start_first(self, manager: DiLoCoManager, contribution: float, memory: Tensor) -> Any:
        """Encode the values and start the first message.

        Args:
            manager: The torchft manager, or its simulated double.
            contribution: This group's weight in the mean.
            memory: uint8, of ``memory_bytes``.

        Returns:
            A Work to wait for.
        """
        sent, received, *self._second = memory.split(self._memory_sizes)
        self._sent = sent.chunk(self._groups if self.has_means else 1)
        self._received = received.chunk(self._groups)
        for index, message in enumerate(self._sent):
            message[:WEIGHT].view(torch.float32).fill_(contribution)
            if self._averages(index):
                message[WEIGHT:] = 0
            else:
                self._encode(self._part(self.values, index), message[WEIGHT:])
        return (manager.all_to_all if self.has_means else manager.all_gather)(received, sent)

    def received_weights(self) -> list[Tensor]:
        """The weight of each group as it has arrived, fp32, once the first messages have."""
        return [message[:WEIGHT].view(torch.float32) for message in self._received]

    def start_second(
        self, manager: DiLoCoManager, weights: Sequence[float], keeps_error: bool
    ) -> Any:
        """Average this group's part and start the second message, once the first has arrived.

        Args:
            manager: The manager that ``start_first`` got.
            weights: The contribution of each group.
            keeps_error: Whether ``finish`` will be asked for the rounding error.

        Returns:
            A Work to wait for, or None if there is no second message.
        """
        self.weights, self._total = weights, sum(weights) or 1.0
        if not self.has_means:
            return None
        gathered, own = self._second
        mean, scratch = self._scratch(), self._scratch()
        for frame in self._frames:
            exact = self._part(self.values, self._rank)[frame.elements]
            self._average(frame, exact, mean, scratch)
            self._format.encode(mean[: frame.size], own[frame.encoded])
            # Without a weight here this group is not in the sum: the connections are those of
            # another quorum, as the peer table says to all.
            if keeps_error and weights[self._rank]:
                rounded = self._decode(own, frame, scratch)[: exact.numel()]
                torch.sub(mean[: exact.numel()], rounded, out=exact)
                exact.mul_(self._total)
        return manager.all_gather(gathered, own)

    def add_squares(self, squares: Squares) -> None:
        """Add the squared norms of what has arrived, once all messages have.

        Args:
            squares: By the rank of the group that has sent it.
        """
        scratch = self._scratch()
        messages = self._means() if self.has_means else [m[WEIGHT:] for m in self._received]
        for rank, message in enumerate(messages):
            for frame in self._frames if rank != self._rank else ():  # its own is as it was sent
                squares.add([self._decode(message, frame, scratch)], [rank])

    def finish(self, error: Tensor | None) -> None:
        """Write the mean into ``values``, once all messages have arrived.

        Args:
            error: Where to write by how much this group's rounding has changed the sum, which is
                the mean times all weights. None: it is not kept.
        """
        sent_scratch, scratch = self._scratch(), self._scratch()
        for index, message in enumerate(self._sent):
            for frame in self._frames:
                values = self._part(self.values, index)[frame.elements]
                sent = values
                if not self._averages(index):
                    sent = self._decode(message[WEIGHT:], frame, sent_scratch)[: values.numel()]
                if error is not None:
                    kept = self._part(error, index)[frame.elements]
                    if sent is values:
                        kept.copy_(values)  # start_second has put the error there
                    else:
                        torch.sub(values, sent, out=kept).mul_(self.weights[self._rank])
                if self.has_means:
                    mean = self._decode(self._means()[index], frame, scratch)
                    values.copy_(mean[: values.numel()])
                else:
                    self._average(frame, sent, values, scratch)

    def _averages(self, index: int) -> bool:
        """Whether this group averages a part, and therefore does not send it."""
        return self.has_means and index == self._rank

    def _means(self) -> Sequence[Tensor]:
        """The means of all parts, as their groups have encoded them."""
        return self._second[0].chunk(self._groups)

    def _average(self, frame: Frame, own: Tensor, into: Tensor, scratch: Tensor) -> None:
        """Average a frame of what has arrived, with these values for this group's own."""
        size, is_first = own.numel(), True
        if size < into.numel() or not any(self.weights):
            into.zero_()  # what is not written below is encoded too
        for rank, (weight, message) in enumerate(zip(self.weights, self._received, strict=True)):
            if weight:
                values = own
                if rank != self._rank:
                    values = self._decode(message[WEIGHT:], frame, scratch)[:size]
                share = weight / self._total
                if is_first:
                    torch.mul(values, share, out=into[:size])
                    is_first = False
                else:
                    into[:size].add_(values, alpha=share)

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
