"""Where a fragment's tensors lie in flat buffers, and the chunks in which these are worked on."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, _foreach_copy_, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from composer_replication.diloco.division import Division

CHUNK = 2**19
"""Elements of a chunk on a CPU: what is written is still in cache when it is read again."""

SCRATCH = 2**26
"""Most bytes of an accelerator's memory for a part of what rests in host memory: 64 MiB."""

LAST_SCRATCH = 2**22
"""The same for numbers rounded to a smaller dtype, where a buffer has no room for them: 4 MiB."""

ALIGNMENT = 16


class Chunk(NamedTuple):
    """A slice of a flat buffer, and the parts of tensors that lie in it one after the other.

    Attributes:
        place: The slice.
        sizes: Elements of each part.
        indices: The index of its tensor.
        parts: Which elements of that tensor it is.
    """

    place: slice
    sizes: list[int]
    indices: list[int]
    parts: list[slice]

    def pairs(
        self,
        tensors: Sequence[Tensor],
        flat: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Views of ``flat``, and for each the part of a tensor, of its shape.

        Args:
            tensors: The tensors, by index.
            flat: 1-D, of the chunk's size: the chunk's slice of a flat buffer.
        """
        views: list[Tensor] = []
        parts: list[Tensor] = []
        slices = flat.split(self.sizes)
        for index, elements, view in zip(self.indices, self.parts, slices, strict=True):
            part = _part_of(tensors[index], elements)
            parts.append(part)
            if part.dim() > 1:
                view = view.view(part.shape)
            views.append(view)
        return views, parts

    def read(
        self,
        tensors: Sequence[Tensor],
        into: Tensor,
    ) -> None:
        """Copy the chunk of the model's tensors.

        Args:
            tensors: The tensors, of any dtype and device.
            into: 1-D fp32, of the chunk's size.
        """
        _foreach_copy_(*self.pairs(tensors, into))

    def write(
        self,
        values: Tensor,
        tensors: Sequence[Tensor],
        alpha: float = 0.0,
        unmixed: Collection[int] = (),
        scratch: Tensor | None = None,
    ) -> None:
        """Set ``tensors = alpha * tensors + (1 - alpha) * values`` in the chunk.

        Args:
            values: 1-D fp32, of the chunk's size.
            tensors: The model's tensors.
            alpha: With 0 the values are copied, since 0 * nan is nan.
            unmixed: The tensors that get the values whatever ``alpha`` is, by index.
            scratch: Memory like ``values`` that may be overwritten.
        """
        views, parts = self.pairs(tensors, values)
        if alpha:
            mixed = torch.empty_like(values) if scratch is None else scratch
            self.read(tensors, mixed)
            torch.lerp(values, mixed, alpha, out=mixed)
            of_mixed, _ = self.pairs(tensors, mixed)
            for number, index in enumerate(self.indices):
                if index not in unmixed:
                    views[number] = of_mixed[number]
        # Ordered by the stream: a non-blocking copy to a CPU could be read before it has arrived.
        is_ordered = parts[0].device.type != "cpu"
        _foreach_copy_(parts, views, non_blocking=is_ordered)


def _part_of(tensor: Tensor, part: slice) -> Tensor:
    """A part of a tensor: a view in one dimension, or of rows if it is scattered in memory."""
    is_whole = part.stop - part.start == tensor.numel()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat if is_whole else flat[part]
    if is_whole:
        return tensor
    row = math.prod(tensor.shape[1:])
    if part.start % row or part.stop % row:  # in the share of a rank, which is only read
        return tensor.reshape(-1)[part]
    return tensor[part.start // row : part.stop // row]


class Layout:
    """The order of a fragment's tensors in flat fp32 buffers: this rank's share, or all of them.

    Arithmetic over a flat buffer takes a few operations however many tensors there are. On a CPU it
    goes chunk by chunk, so that memory is read once. On an accelerator a launch takes longer than a
    chunk's arithmetic, so there it goes over all at once, unless it needs scratch memory for all.

    Args:
        division: Which part of the tensors the buffers have.
        tensors: The model's tensors on this rank.
        num_parameters: How many of them, from the first on, are parameters; None for all. The
            others are buffers.
        needs_scratch: Whether what is in the buffers is copied to the accelerator or inside it, a
            chunk of at most ``SCRATCH`` bytes at a time.

    Attributes:
        device: Where the model is.
        chunks: All elements, in order. In a chunk all tensors are parameters, or all are buffers;
            they have one dtype, and as many ranks hold them.
        chunks_to_pack: The same in smaller parts, if numbers are rounded to pack them.
    """

    def __init__(
        self,
        division: Division,
        tensors: Sequence[Tensor],
        num_parameters: int | None = None,
        needs_scratch: bool = False,
    ) -> None:
        self.division = division
        self.device = tensors[0].device
        self.num_parameters = len(tensors) if num_parameters is None else num_parameters
        self._firsts = [*itertools.accumulate(division.sizes, initial=0)]
        self.chunk = functools.cache(self._chunk)
        limit = _limit(tensors, needs_scratch)
        self.chunks = self._cut(tensors, lambda start: limit)
        self.chunks_to_pack = self.chunks
        has_low = any(tensor.dtype != torch.float32 for tensor in tensors)
        if has_low and limit >= self.num_elements:
            self.chunks_to_pack = self._cut(tensors, self._most_to_pack)

    @property
    def num_elements(self) -> int:
        """Elements of a flat buffer in this order."""
        return self._firsts[-1]

    # ---- chunks ----------------------------------------------------------------------------------

    def _most_to_pack(self, start: int) -> int:
        """Most elements of a chunk from here on that can be rounded in memory that follows it.

        They take half of fp32's bytes, or fewer.
        """
        follow = self.num_elements - start
        return max(LAST_SCRATCH // 2, 2 * follow // 3) // ALIGNMENT * ALIGNMENT

    def _cut(
        self,
        tensors: Sequence[Tensor],
        most: Callable[[int], int],
    ) -> list[Chunk]:
        def kind(index: int) -> tuple[torch.dtype, int, bool]:
            is_parameter = index < self.num_parameters
            return tensors[index].dtype, self.division.copies[index], is_parameter

        chunks = []
        indices = [index for index, size in enumerate(self.division.sizes) if size]
        for _, group in itertools.groupby(indices, kind):
            members = [*group]
            start = self._firsts[members[0]]
            end = self._firsts[members[-1] + 1]
            while start < end:
                stop = start + most(start)
                stop = self._end_of(tensors, start, stop) if stop < end else end
                chunks.append(self._chunk(start, stop))
                start = stop
        return chunks

    def _end_of(
        self,
        tensors: Sequence[Tensor],
        start: int,
        stop: int,
    ) -> int:
        """Move the end of a chunk to that of a row: a scattered tensor has views of rows alone."""
        if self.division.num_shares > 1:  # shares are only read
            return stop
        index = bisect_right(self._firsts, stop) - 1
        row = math.prod(tensors[index].shape[1:])
        begun = (stop - self._firsts[index]) % row
        end = stop - begun
        return end if end > start else end + row

    def _chunk(self, start: int, stop: int) -> Chunk:
        """The chunk from one element to another, without the padding behind all."""
        stop = min(stop, self.num_elements)
        chunk = Chunk(slice(start, stop), [], [], [])
        first = bisect_right(self._firsts, start) - 1
        after_last = bisect_left(self._firsts, stop)
        for index in range(first, after_last):
            own = self.division.parts[index]
            offset = own.start - self._firsts[index]
            begin = max(own.start, start + offset)
            end = min(own.stop, stop + offset)
            if begin == end:
                continue
            chunk.sizes.append(end - begin)
            chunk.indices.append(index)
            chunk.parts.append(slice(begin, end))
        return chunk


def _limit(tensors: Sequence[Tensor], needs_scratch: bool) -> int:
    if tensors[0].device.type == "cpu":
        return CHUNK
    if not needs_scratch:
        return max(1, sum(tensor.numel() for tensor in tensors))
    low = [tensor.element_size() for tensor in tensors if tensor.dtype != torch.float32]
    num_bytes = 4 + max(low, default=0)
    return SCRATCH // num_bytes // ALIGNMENT * ALIGNMENT


class Squares:
    """The squared L2 norm of each tensor in a flat buffer, added up piece by piece.

    Args:
        count: The number of tensors.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._indices: list[int] = []
        self._found: list[Tensor] = []

    def add(
        self,
        parts: list[Tensor] | tuple[Tensor, ...],
        indices: list[int],
    ) -> None:
        """Add parts of tensors. It does not wait for an accelerator.

        Args:
            parts: 1-D fp32, on one device.
            indices: The tensor of each part.
        """
        self._indices += indices
        if parts and parts[0].device.type != "cpu":
            self._found += _foreach_norm(parts)
            return
        for part in parts:
            square = torch.dot(part, part)  # in half the time of a norm
            self._found.append(square)

    @functools.cached_property
    def by_tensor(self) -> Tensor:
        """All that was added: 1-D float64 on the CPU. The first look waits for an accelerator."""
        total = torch.zeros(self._count, dtype=torch.float64)
        if self._found:
            found = torch.stack(self._found)
            here = found.to("cpu", torch.float64)
            if found.device.type != "cpu":  # there ``add`` has taken norms
                here = here.square_()
            indices = torch.tensor(self._indices)
            total.index_add_(0, indices, here)
        return total


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors where they are, in one operation on an accelerator."""
    copies = [*map(torch.empty_like, tensors)]
    _foreach_copy_(copies, [*tensors])
    return copies
