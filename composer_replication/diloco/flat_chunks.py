"""Where a fragment's tensors lie in flat buffers, and the chunks in which these are worked on."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, _foreach_copy_, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from composer_replication.diloco.division import Division

CHUNK = 2**18
"""Elements of a chunk on a CPU: what is written is still in cache when it is read again."""

SCRATCH = 2**26
"""Most bytes of an accelerator's memory for a part of what rests in host memory: 64 MiB."""

LAST_SCRATCH = 2**22
"""The same for numbers rounded to a smaller dtype, where a buffer has no room for them: 4 MiB."""

ALIGNMENT = 16


class Pieces(NamedTuple):
    """The parts of tensors that lie one after the other in a slice of a flat buffer.

    Attributes:
        place: The slice.
        sizes: Elements of each part.
        parts: The index of its tensor, and which elements of it, as a slice; None for all of it.
    """

    place: slice
    sizes: list[int]
    parts: list[tuple[int, slice | None]]

    @property
    def indices(self) -> list[int]:
        """The index of each part's tensor."""
        return [index for index, _ in self.parts]


class Chunk(NamedTuple):
    """Adjacent elements of flat buffers for which a sync does the same.

    Attributes:
        pieces: The tensors in it.
        dtype: That of these tensors in the model.
        copies: How many ranks of the group hold the same elements.
        is_parameter: Whether they are parameters, and not buffers.
    """

    pieces: Pieces
    dtype: torch.dtype
    copies: int
    is_parameter: bool

    @property
    def place(self) -> slice:
        return self.pieces.place

    def pairs(self, tensors: Sequence[Tensor], flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the chunk in a flat buffer, and for each the part of a tensor, of its shape."""
        views: list[Tensor] = []
        parts: list[Tensor] = []
        slices = flat.split(self.pieces.sizes)
        for (index, elements), view in zip(self.pieces.parts, slices, strict=True):
            part = _part_of(tensors[index], elements)
            parts.append(part)
            views.append(view.view(part.shape) if part.dim() > 1 else view)
        return views, parts

    def read(self, tensors: Sequence[Tensor], into: Tensor) -> None:
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
            for number, index in enumerate(self.pieces.indices):
                if index not in unmixed:
                    views[number] = of_mixed[number]
        # Ordered by the stream: a non-blocking copy to a CPU could be read before it has arrived.
        is_ordered = parts[0].device.type != "cpu"
        _foreach_copy_(parts, views, non_blocking=is_ordered)


def _part_of(tensor: Tensor, part: slice | None) -> Tensor:
    """A part of a tensor: a view in one dimension, or of rows if it is scattered in memory."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return flat if part is None else flat[part]
    if part is None:
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
        division: What this rank has of the tensors.
        tensors: The model's tensors on this rank.
        num_parameters: How many of them, from the first on, are parameters; None for all. The
            others are buffers.
        whole: Whether the buffers have the shares of all ranks, and not this rank's alone.
        rests_elsewhere: Whether global parameters come from host memory to the accelerator.

    Attributes:
        sizes: Elements of each tensor in a flat buffer.
        are_parameters: Which of them are parameters: 1-D bool.
        chunks: All elements, in order.
        chunks_to_pack: The same in smaller parts, if numbers are rounded to pack them.
    """

    def __init__(
        self,
        division: Division,
        tensors: Sequence[Tensor],
        num_parameters: int | None = None,
        *,
        whole: bool = False,
        rests_elsewhere: bool = False,
    ) -> None:
        self.division = division
        self.sizes = division.whole_sizes if whole else division.sizes
        self._is_cut = not whole and division.num_shares > 1
        self._firsts = [*itertools.accumulate(self.sizes, initial=0)]
        count = len(tensors) if num_parameters is None else num_parameters
        self._kinds = []
        self._rows = []
        for index, tensor in enumerate(tensors):
            self._kinds.append((tensor.dtype, division.copies[index], index < count))
            row = 1 if self._is_cut else math.prod(tensor.shape[1:])
            self._rows.append(row)
        self.are_parameters = torch.arange(len(tensors)) < count
        self._pieces: dict[tuple[int, int], Pieces] = {}
        self._limit = _limit(tensors, whole or rests_elsewhere)
        self.chunks = self._cut(lambda start: self._limit)
        self.chunks_to_pack = self.chunks
        has_low = any(chunk.dtype != torch.float32 for chunk in self.chunks)
        if has_low and self._limit >= self.num_elements:
            self.chunks_to_pack = self._cut(self._most_to_pack)

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

    def _cut(self, most: Callable[[int], int]) -> list[Chunk]:
        chunks = []
        indices = [index for index, size in enumerate(self.sizes) if size]
        for kind, group in itertools.groupby(indices, self._kinds.__getitem__):
            members = [*group]
            start = self._firsts[members[0]]
            end = self._firsts[members[-1] + 1]
            while start < end:
                stop = start + most(start)
                stop = self._end_of(start, stop) if stop < end else end
                pieces = self.pieces(slice(start, stop))
                chunks.append(Chunk(pieces, *kind))
                start = stop
        return chunks

    def _end_of(self, start: int, stop: int) -> int:
        """Move the end of a chunk to that of a row: a scattered tensor has views of rows alone."""
        index = bisect_right(self._firsts, stop) - 1
        row = self._rows[index]
        end = stop - (stop - self._firsts[index]) % row
        return end if end > start else end + row

    def pieces(self, place: slice) -> Pieces:
        """Return which parts of tensors are in a slice of a flat buffer; without its padding."""
        key = place.start, place.stop
        if key not in self._pieces:
            self._pieces[key] = self._find_pieces(place)
        return self._pieces[key]

    def _find_pieces(self, place: slice) -> Pieces:
        sizes: list[int] = []
        parts: list[tuple[int, slice | None]] = []
        begin = max(0, bisect_right(self._firsts, place.start) - 1)
        for index in range(begin, len(self.sizes)):
            first = self._firsts[index]
            if first >= place.stop:
                break
            start = max(0, place.start - first)
            stop = min(self.sizes[index], place.stop - first)
            if start < stop:
                sizes.append(stop - start)
                parts.append((index, self._elements(index, start, stop)))
        end = min(place.stop, self.num_elements)
        return Pieces(slice(place.start, end), sizes, parts)

    def _elements(self, index: int, start: int, stop: int) -> slice | None:
        """Which elements of a tensor are at these of its part in a flat buffer; None: all of it."""
        if self._is_cut:
            begin = self.division.part_start(index)
            return slice(begin + start, begin + stop)
        if stop - start == self.sizes[index]:
            return None
        return slice(start, stop)


def _limit(tensors: Sequence[Tensor], in_parts: bool) -> int:
    if not tensors or tensors[0].device.type == "cpu":
        return CHUNK
    if not in_parts:
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
        self._total: Tensor | None = None

    def add(self, parts: list[Tensor] | tuple[Tensor, ...], indices: list[int]) -> None:
        """Add parts of tensors. It does not wait for an accelerator.

        Args:
            parts: 1-D fp32, on one device.
            indices: The tensor of each part.
        """
        self._total = None
        self._indices += indices
        if parts and parts[0].device.type != "cpu":
            self._found += _foreach_norm(parts)
        else:
            self._found += (torch.dot(part, part) for part in parts)  # in half the time of a norm

    def by_tensor(self) -> Tensor:
        """Return them: 1-D float64 on the CPU. The first call waits for an accelerator."""
        if self._total is not None:
            return self._total
        self._total = torch.zeros(self._count, dtype=torch.float64)
        if self._found:
            found = torch.stack(self._found)
            here = found.to("cpu", torch.float64)
            if found.device.type != "cpu":  # there ``add`` has taken norms
                here = here.square_()
            self._total.index_add_(0, torch.tensor(self._indices), here)
        return self._total


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors where they are, in one operation on an accelerator."""
    copies = [*map(torch.empty_like, tensors)]
    _foreach_copy_(copies, [*tensors])
    return copies
