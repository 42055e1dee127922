"""The ranks of a replica group that hold the same parameters share the work of a sync."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup


class RankShare:
    """This rank's part of a flat buffer over tensors: it sends that part alone to the other groups.

    Under DDP all ranks of a group hold the same. Each averages its share with the same rank of the
    other groups; then the ranks gather the whole mean, on the line between them, which is fast. So
    the traffic between groups does not grow with their ranks.

    Args:
        sizes: Elements of each tensor; they lie one after the other.
        ranks: Of the group, who hold the same; None for a rank by itself.
        device: Where the ranks talk to each other; the whole may be elsewhere.
        bucket: Largest number of elements that a rank sends the others at a time.
    """

    ALIGNMENT = 16

    def __init__(
        self, sizes: Sequence[int], ranks: ProcessGroup | None, device: torch.device, bucket: int
    ) -> None:
        self._ranks, self._device, self._bucket = ranks, device, bucket
        rank, size = (ranks.rank(), ranks.size()) if ranks is not None else (0, 1)
        share = -(-sum(sizes) // size)
        if size > 1:
            share = -(-share // self.ALIGNMENT) * self.ALIGNMENT
        self.padded = share * size
        """Elements of memory for the whole: all shares are equally large."""
        self.start, self.stop = rank * share, (rank + 1) * share
        self._parts = [
            slice(max(0, self.start - first), max(0, self.stop - first))
            for first in itertools.accumulate(sizes[:-1], initial=0)
        ][: len(sizes)]
        self.sizes = [len(range(size)[part]) for size, part in zip(sizes, self._parts, strict=True)]
        """Elements of each tensor that are in this rank's share."""

    def own(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """This rank's part of each tensor, 1-D: a view, or a copy if the tensor is scattered."""
        for tensor, part in zip(tensors, self._parts, strict=True):
            yield tensor.reshape(-1)[part]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks of the group, the same on all of them."""
        if self._ranks is None:
            return value
        value = value.to(self._device)
        torch.distributed.all_reduce(value, group=self._ranks)
        return value

    def gather(self, flat: Tensor) -> None:
        """Fill in the others' shares. Every rank of the group calls it, or none."""
        if self._ranks is None:
            return
        shares = flat.view(self._ranks.size(), -1)
        for bucket in shares.split(self._bucket, dim=1):
            own = bucket[self._ranks.rank()].to(self._device, copy=True)
            gathered = own.new_empty(bucket.numel())
            torch.distributed.all_gather_into_tensor(gathered, own, group=self._ranks)
            bucket.copy_(gathered.view(bucket.shape))
