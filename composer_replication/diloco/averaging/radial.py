"""Radial-directional averaging: a merge whose size does not depend on the number of groups."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from composer_replication.diloco.averaging.rank_shares import RankShare
from composer_replication.diloco.shards import Shards
from composer_replication.diloco.torchft_api import DiLoCoManager

WANTED, FOLLOWED = -1.0, -2.0
"""In place of a norm: the tensor is averaged plainly as this group wants, or as another does."""

CANCELLED = 2**-20
"""A mean of unit directions that is shorter is what rounding leaves of directions that cancel."""

WIDTH = 2**16
"""Partial sums of the elements of a tensor."""


class MergeMismatchError(RuntimeError):
    """Some groups have sent a tensor as it is, others its direction. It is never raised."""


class Radial:
    """Merges pseudo-gradients delta_i by radial-directional averaging (arXiv 2604.21428).

    Of each tensor, with w_i for ``c_i / sum(c)``, n_i for ``norm(delta_i)`` and u for
    ``sum(w_i delta_i / n_i)``, the merge is

        sum(w_i n_i) * u / norm(u)

    If directions are orthogonal, the norm of a plain mean of k groups is 1 / sqrt(k) of theirs, so
    that the outer step changes whenever a group joins or dies. The norm of this merge is the mean
    of the groups' norms. Where no direction is left, because all deltas are 0 or they cancel, the
    merge is 0.

    The norms travel in a table of their own beside the values. Where the network sums the values, a
    group sends ``c_i delta_i / n_i``. In a quantized format it sends delta_i, and who takes the
    mean weights it: so neither the message nor the residual of the error feedback has another unit
    than with the plain mean, though n_i changes with each sync.

    A tensor is averaged plainly in a sync if one group wants that, because the tensor is frozen or
    replaced by an average. If another one did not know and has sent a direction, the sync does not
    commit, and is tried again with the tensor as it is in all groups.

    Args:
        merged: Which tensors are merged so, by index.
        share: Of the tensors, what this rank sends.
        shards: Of the tensors, where each rank of this group holds one.
        device: Where the messages live.
        is_summed: Whether the network sums the values.
        gathers: Whether this rank gets the whole mean, or that of its share.
    """

    def __init__(
        self,
        merged: Collection[int],
        share: RankShare,
        shards: Shards,
        device: torch.device,
        *,
        is_summed: bool,
        gathers: bool,
    ) -> None:
        self._merged, self._share, self._shards = sorted(merged), share, shards
        self._is_summed = is_summed
        self._device = device
        self._sends_parts = shards.are_held or share.num_ranks > 1
        # An accelerator is asked for the norms of all tensors at once, since it is waited for.
        self._waits_for_norms = self._sends_parts or device.type != "cpu"
        self._gets_parts = shards.are_held or (share.num_ranks > 1 and not gathers)
        self._firsts = [*accumulate(share.sizes, initial=0)]
        self._squares: list[Tensor] = []
        self._norms: list[float] = []
        self._wanted = self._followed = frozenset[int]()
        self._total, self._is_of_one = 0.0, True
        self._mean_norms: dict[int, float] = {}
        self._factors: list[dict[int, float]] = []
        self._norm_of_sums: list[float] = []

    # ---- what this group sends -------------------------------------------------------------------

    def begin(self, wanted: Collection[int]) -> None:
        """Begin a sync in which this group wants some tensors averaged plainly."""
        self._wanted = frozenset(wanted)
        self._sent_as_direction = set(self._merged) - self._wanted - self._followed
        self._squares = []

    def measure(self, chunks: Sequence[Tensor], squares: Sequence[Tensor]) -> None:
        """Take the norm of the next tensor, and make it a direction if it is to be one.

        Args:
            chunks: The tensor, weighted, in parts that have been written one after the other.
            squares: The sum of squares of each before that.
        """
        index = len(self._squares)
        square = squares[0] if len(squares) == 1 else torch.stack(list(squares)).sum()
        self._squares.append(square)
        if not self._waits_for_norms:
            self._point(index, math.sqrt(square), chunks)

    def end(self, tensors: Sequence[Tensor]) -> None:
        """Do the same where a norm is over the parts of all ranks, by a collective of them."""
        squares = torch.stack(self._squares)
        if self._sends_parts:
            squares = self._shards.sum(self._share.sum(squares))
        self._norms = squares.sqrt().tolist()
        if self._waits_for_norms:
            for index, (norm, tensor) in enumerate(zip(self._norms, tensors, strict=True)):
                self._point(index, norm, [tensor])

    def _point(self, index: int, norm: float, chunks: Sequence[Tensor]) -> None:
        if self._is_summed and norm > 0 and index in self._sent_as_direction:
            for chunk in reversed(chunks):  # the last one is still in cache
                chunk.mul_(1 / norm)

    def send(self, manager: DiLoCoManager, contribution: float) -> RadialWork:
        """Start the allreduce of the table of norms: a row for each group."""
        rank = manager.participating_rank()
        assert rank is not None, "torchft gives every group of a synchronous quorum a rank"
        # A group without a contribution may have norms that are not finite.
        entries = [self._norms[index] if contribution else 0.0 for index in self._merged]
        for place, index in enumerate(self._merged):
            if index not in self._sent_as_direction:
                entries[place] = WANTED if index in self._wanted else FOLLOWED
        table = torch.zeros(manager.num_participants(), 1 + len(entries))
        table[rank] = torch.tensor([contribution, *entries])
        table = table.to(self._device)
        work = manager.allreduce(table, reduce_op=ReduceOp.SUM)  # pyright: ignore[reportArgumentType]
        return RadialWork(self, manager, work, table)

    def read(self, table: Tensor, rank: int) -> MergeMismatchError | None:
        """Read what all groups have sent.

        Args:
            table: The sum of the tables.
            rank: This group's row.

        Returns:
            Why the sync must not commit, if it must not.
        """
        rows = table.cpu().tolist()
        weights = [row[0] for row in rows]
        entries = {i: [row[place] for row in rows] for place, i in enumerate(self._merged, 1)}
        plain = {index for index, column in entries.items() if WANTED in column}
        if self._is_summed:  # else who takes the mean needs every norm, and no warning
            self._followed = frozenset(i for i in plain if entries[i][rank] != WANTED)
        contributes = [place for place, weight in enumerate(weights) if weight]
        odd = [
            index
            for index, column in entries.items()
            if any((column[place] < 0) != (index in plain) for place in contributes)
        ]
        self._total, self._is_of_one = sum(weights), len(contributes) <= 1
        if self._is_of_one and not self._is_summed:
            plain = set(entries)  # bitwise the values of that group
        self._mean_norms = {
            index: sum(w * norm for w, norm in zip(weights, column, strict=True)) / self._total
            for index, column in entries.items()
            if index not in plain and self._total
        }
        self._factors = [
            {
                i: mean / entries[i][place]
                for i, mean in self._mean_norms.items()
                if entries[i][place]
            }
            for place in range(len(rows))
        ]
        if not odd or not self._is_summed:
            return None
        return MergeMismatchError(
            f"not all replica groups knew of {len(odd)} tensors of this fragment whether they are "
            "averaged plainly, as frozen ones and averages are: now they do"
        )

    # ---- what comes of it ------------------------------------------------------------------------

    def weighting(self, group: int, first: int, size: int) -> Iterator[tuple[slice, float]]:
        """What a group's values are multiplied by before they are averaged.

        Args:
            group: By its rank in the quorum.
            first: The first of the elements in question, in this rank's share.
            size: How many there are.

        Returns:
            The elements of each tensor, counted from ``first``, with their factor.
        """
        index, start, stop = bisect_right(self._firsts, first) - 1, first, first + size
        while start < stop and index < len(self._firsts) - 1:
            end = min(stop, self._firsts[index + 1])
            if start < end:
                yield slice(start - first, end - first), self._factors[group].get(index, 1.0)
            start, index = end, index + 1

    def measure_sums(self, sums: Sequence[Tensor]) -> None:
        """Take the norms of all sums at once, where the ranks hold parts of them. A collective."""
        if not self._gets_parts:
            return
        squares = torch.zeros(len(sums), dtype=torch.float64)
        for index in self._merged:
            squares[index] = self._shards.own_part(_square(sums[index]), index)
        squares = self._shards.sum(self._share.sum(squares))
        self._norm_of_sums = squares.sqrt().tolist()

    def divisor(self, index: int, sums: Tensor, plain: float) -> float:
        """By what the sum of a tensor is divided to be the merge.

        Args:
            index: Of the tensor.
            sums: All of it that this rank has got.
            plain: The divisor of a plain mean.
        """
        norm = self._mean_norms.get(index)
        if norm is None:
            return plain
        if self._is_of_one:
            return self._total / norm if norm else plain
        own = self._norm_of_sums[index] if self._gets_parts else math.sqrt(float(_square(sums)))
        if own <= CANCELLED * (self._total if self._is_summed else norm):
            return math.inf  # no direction is left
        return own / norm


class RadialWork:
    """Reads the table when it has arrived."""

    def __init__(self, radial: Radial, manager: DiLoCoManager, work: Any, table: Tensor) -> None:
        self._radial, self._manager, self._work, self._table = radial, manager, work, table

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the table and read it. The manager's timeout bounds the wait."""
        del timeout
        self._work.wait()
        rank = self._manager.participating_rank()
        if self._manager.errored() is None and rank is not None:
            mismatch = self._radial.read(self._table, rank)
            if mismatch is not None:
                self._manager.report_error(mismatch)
        return True


def _square(values: Tensor) -> Tensor:
    """The sum of squares, float64, in the same bits on all CPUs that groups may have.

    BLAS adds in an order that depends on the processor. Groups that divide by other numbers would
    no longer hold the same parameters.
    """
    if values.device.type != "cpu":
        return torch.dot(values, values).double()
    width = WIDTH
    while width >= 2 * max(1, values.numel()):
        width //= 2
    sums = torch.zeros(width)
    for part in reversed(values.split(width)):  # the first one is read again at once
        sums[: part.numel()].addcmul_(part, part)
    while width > 128:
        width //= 2
        sums = sums[:width].add_(sums[width:])
    return torch.tensor(math.fsum(sums.tolist()), dtype=torch.float64)
