"""The quantized messages of one bucket."""

from __future__ import annotations

import math
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

    def __init__(
        self,
        values: Tensor,
        groups: int,
        rank: int,
        wire_format: WireFormat,
    ) -> None:
        self.values = values
        self._groups = groups
        self._rank = rank
        self._format = wire_format
        self.has_means = groups > 2
        self._num_parts = groups if self.has_means else 1
        unit = self._num_parts * PART
        units = math.ceil(values.numel() / unit)
        self._size = max(1, units) * PART
        # On a CPU the values of a frame are still in cache when they are read again. All groups of
        # a run have the same kind of device, and therefore the same frames.
        step = FRAME if values.device.type == "cpu" else self._size
        self._frames: list[Frame] = []
        encoded = 0
        for start in range(0, self._size, step):
            size = min(step, self._size - start)
            stop = encoded + wire_format.num_bytes(size)
            frame = Frame(
                elements=slice(start, start + size),
                encoded=slice(encoded, stop),
                size=size,
            )
            self._frames.append(frame)
            encoded = stop
        message = WEIGHT + encoded
        self.num_bytes = message
        self._memory_sizes = [self._num_parts * message, groups * message]
        if self.has_means:
            self.num_bytes = groups * (message + encoded) // 2
            self._memory_sizes += [groups * encoded, encoded]
        self.memory_bytes = sum(self._memory_sizes)

    def start_first(
        self,
        manager: DiLoCoManager,
        contribution: float,
        memory: Tensor,
    ) -> Any:
        """Encode the values and start the first message.

        Args:
            manager: The torchft manager, or its simulated double.
            contribution: This group's weight in the mean.
            memory: uint8, of ``memory_bytes``.

        Returns:
            A Work to wait for.
        """
        sent, received, *self._second = memory.split(self._memory_sizes)
        weights, self._sent = _weights_and_parts(sent, self._num_parts)
        weights.fill_(contribution)
        for index, part in enumerate(self._sent):
            # Of the part that it averages itself, it reads nothing that was sent.
            if index != self._rank or not self.has_means:
                values = self._part(self.values, index)
                self._encode(values, part)
        weights, self._received = _weights_and_parts(received, self._groups)
        self.received_weights = weights.squeeze(1)
        if self.has_means:
            return manager.all_to_all(received, sent)
        return manager.all_gather(received, sent)

    def start_second(
        self,
        manager: DiLoCoManager,
        weights: Sequence[float],
    ) -> Any:
        """Average this group's part and start the second message, once the first has arrived.

        Args:
            manager: The manager that ``start_first`` got.
            weights: The contribution of each group.

        Returns:
            A Work to wait for, or None if there is no second message.
        """
        self.weights = weights
        self._total = sum(weights) or 1.0
        if not self.has_means:
            return None
        gathered, own = self._second
        self._means = gathered.view(self._groups, -1)
        scratch = self._scratch(self._groups)
        mean, rounded = self._scratch(2)
        own_values = self._part(self.values, self._rank)
        for frame in self._frames:
            exact = own_values[frame.elements]
            size = exact.numel()
            decoded = self._decode(self._received, frame, scratch)
            parts = [row[:size] for row in decoded]
            parts[self._rank] = exact
            mean[size:] = 0.0  # it is encoded too
            self._average(parts, mean[:size])
            encoded = own[frame.encoded]
            self._format.encode(mean[: frame.size], encoded)
            # Without a weight here this group is not in the sum: it contributes nothing, or the
            # connections are those of another quorum, as the peer table says to all.
            if weights[self._rank]:
                self._decode(own, frame, rounded)
                torch.sub(mean[:size], rounded[:size], out=exact)
                exact.mul_(self._total)
        return manager.all_gather(gathered, own)

    def add_squares(self, squares: Squares) -> None:
        """Add the squared norms of what has arrived, once all messages have.

        Args:
            squares: By the rank of the group that has sent it.
        """
        scratch = self._scratch()
        arrived = self._means if self.has_means else self._received
        for rank, part in enumerate(arrived):
            if rank == self._rank:
                continue  # its own is as it was sent
            for frame in self._frames:
                decoded = self._decode(part, frame, scratch)
                squares.add([decoded], [rank])

    def finish(self, error: Tensor | None) -> None:
        """Write the mean into ``values``, once all messages have arrived.

        Args:
            error: Where to write by how much this group's rounding has changed the sum, which is
                the mean times all weights. None: it is not kept.
        """
        if self.has_means:
            self._take_means(error)
            return
        scratch = self._scratch(self._groups)
        for frame in self._frames:
            values = self.values[frame.elements]
            decoded = self._decode(self._received, frame, scratch)
            parts = [row[: values.numel()] for row in decoded]
            if error is not None:  # before the mean is written over the values
                self._keep_error(values, parts[self._rank], error[frame.elements])
            self._average(parts, values)

    def _take_means(self, error: Tensor | None) -> None:
        """Decode the means of all parts, as their groups have encoded them."""
        scratch = self._scratch()
        for index in range(self._groups):
            values = self._part(self.values, index)
            # The values are read before the mean is written over them.
            kept = None if error is None else self._part(error, index)
            if kept is not None and index == self._rank:
                kept.copy_(values)  # start_second has put the error there
                kept = None
            for frame in self._frames:
                own = values[frame.elements]
                if kept is not None:
                    sent = self._decode(self._sent[index], frame, scratch)
                    self._keep_error(own, sent, kept[frame.elements])
                mean = self._decode(self._means[index], frame, scratch)
                own.copy_(mean[: own.numel()])

    def _average(
        self,
        parts: Sequence[Tensor],
        into: Tensor,
    ) -> None:
        """Write the weighted mean of what the groups have sent; zeros if none has a weight."""
        shares = []
        for weight, part in zip(self.weights, parts, strict=True):
            if weight:  # 0 * nan is nan
                shares.append((part, weight / self._total))
        if not shares:
            into.zero_()
            return
        (part, share), *others = shares
        torch.mul(part, share, out=into)
        for part, share in others:
            into.add_(part, alpha=share)

    def _keep_error(
        self,
        values: Tensor,
        sent: Tensor,
        into: Tensor,
    ) -> None:
        """Write what rounding has taken from the sum: this group's values minus what it sent."""
        torch.sub(values, sent[: values.numel()], out=into)
        weight = self.weights[self._rank]
        if weight != 1.0:
            into.mul_(weight)

    def _part(
        self,
        values: Tensor,
        index: int,
    ) -> Tensor:
        start = index * self._size
        return values[start : start + self._size]

    def _encode(
        self,
        part: Tensor,
        into: Tensor,
    ) -> None:
        """Encode a part of the values. The last parts may be shorter and are padded with zeros."""
        for frame in self._frames:
            values = part[frame.elements]
            missing = frame.size - values.numel()
            if missing:
                values = torch.nn.functional.pad(values, (0, missing))
            self._format.encode(values, into[frame.encoded])

    def _decode(
        self,
        encoded: Tensor,
        frame: Frame,
        into: Tensor,
    ) -> Tensor:
        """Decode a frame of an encoded part, or of rows of them."""
        decoded = into[..., : frame.size]
        self._format.decode(encoded[..., frame.encoded], decoded)
        return decoded

    def _scratch(self, *rows: int) -> Tensor:
        size = self._frames[0].size
        return torch.empty(*rows, size, device=self.values.device)


def _weights_and_parts(message: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The weights of a message of so many rows, shape (count, 1), and what follows each: views."""
    rows = message.view(count, -1)
    weights, parts = rows.tensor_split([WEIGHT], dim=1)
    return weights.view(torch.float32), parts
