"""The ranks of a replica group that hold the same parameters share the work of a sync."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

BUCKET = 2**23
"""Largest number of elements in a message: 32 MiB of fp32. It never changes a result."""

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for the shares of the others when a whole tensor is asked for."""


@torch.no_grad()
def take_first(tensors: Iterable[Tensor], ranks: ProcessGroup, device: torch.device | None) -> None:
    """Give all ranks the first one's values of tensors that each holds whole, such as buffers.

    DDP does that before the next forward pass only, and FSDP2 never.
    """
    for tensor in tensors:
        values = tensor.detach().reshape(-1).view(torch.uint8).to(device)
        torch.distributed.broadcast(values, group=ranks, group_src=0)
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


class HostRanks:
    """The ranks of a group once more, in a process group of their own that talks from host memory.

    A rank that asks for whole tensors alone must not disturb the process group in which they train.

    Args:
        ranks: The process group in which they train.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = torch.distributed.get_process_group_ranks(ranks)
        self._group: ProcessGroup | None = None

    def connected(self) -> ProcessGroup:
        """The process group, which the first call connects; a collective of the ranks.

        ``DiLoCo`` does not connect it when it is built. A rank can fail before that, for example
        because the run rejects it, and the others would wait for it.
        """
        if self._group is None:
            self._group = torch.distributed.new_group(
                self._ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True
            )
        assert self._group is not None, "this rank is one of them"
        return self._group


class RankShare:
    """This rank's part of a flat buffer over tensors: it sends that part alone to the other groups.

    Under DDP all ranks of a group hold the same. Each averages its share with the same rank of the
    other groups; then the ranks gather what comes of it, on the line between them, which is fast.
    So the traffic between groups does not grow with their ranks.

    Args:
        sizes: Elements of each tensor; they lie one after the other.
        ranks: Of the group, who hold the same; None for a rank by itself.
        device: Where the ranks talk to each other; the buffer may be elsewhere.
        host_ranks: The same ranks, for whole tensors; None for a rank by itself.
    """

    ALIGNMENT = 16

    def __init__(
        self,
        sizes: Sequence[int],
        ranks: ProcessGroup | None = None,
        device: torch.device | None = None,
        host_ranks: HostRanks | None = None,
    ) -> None:
        self.whole_sizes, self.bucket = list(sizes), BUCKET
        self._ranks, self._device, self._host_ranks = ranks, device, host_ranks
        self._rank, self.num_ranks = (ranks.rank(), ranks.size()) if ranks is not None else (0, 1)
        share = -(-sum(sizes) // self.num_ranks)
        if self.num_ranks > 1:
            share = -(-share // self.ALIGNMENT) * self.ALIGNMENT
        self._share = share
        self.padded = share * self.num_ranks
        """Elements of memory for the whole: all shares are equally large."""
        self.start, self.stop = self._rank * share, (self._rank + 1) * share
        self._firsts = [*itertools.accumulate(sizes, initial=0)]
        self._parts = [self._part(index, self._rank) for index in range(len(sizes))]
        self.sizes = [part.stop - part.start for part in self._parts]
        """Elements of each tensor that are in this rank's share."""

    def _part(self, index: int, rank: int) -> slice:
        """The elements of a tensor that are in the share of a rank."""
        first, size = self._firsts[index], self.whole_sizes[index]
        bounds = (rank * self._share - first, (rank + 1) * self._share - first)
        return slice(*(max(0, min(size, bound)) for bound in bounds))

    def own(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """This rank's part of each tensor, 1-D: a view, or a copy if the tensor is scattered."""
        return (self.part_of(index, tensor) for index, tensor in enumerate(tensors))

    def part_of(self, index: int, tensor: Tensor) -> Tensor:
        """This rank's part of one tensor, as ``own`` gives it."""
        flat = tensor.reshape(-1)
        return flat if self.num_ranks == 1 else flat[self._parts[index]]

    def level(self, tensors: Iterable[Tensor]) -> None:
        """See ``take_first``. Every rank of the group calls it, or none."""
        if self._ranks is not None:
            take_first(tensors, self._ranks, self._device)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks of the group, the same on all of them."""
        if self._ranks is None:
            return value
        value = value.to(self._device)
        torch.distributed.all_reduce(value, group=self._ranks)
        return value

    def norms(self, own: Sequence[float]) -> list[float]:
        """L2 norms over all shares, given those of this rank's; with others a collective."""
        return self.sum(torch.tensor(own, dtype=torch.float64).square()).sqrt().tolist()

    def gather(self, flat: Tensor) -> None:
        """Fill in the others' shares. Every rank of the group calls it, or none."""
        if self._ranks is None:
            return
        shares = flat.view(self._ranks.size(), -1)
        for bucket in shares.split(self.bucket, dim=1):
            own = bucket[self._rank].to(self._device, copy=True)
            gathered = own.new_empty(bucket.numel())
            torch.distributed.all_gather_into_tensor(gathered, own, group=self._ranks)
            bucket.copy_(gathered.view(bucket.shape))

    def whole(self, index: int, own: Tensor) -> Tensor:
        """All of one tensor, 1-D, given this rank's part. Every rank of the group calls it.

        Raises:
            RuntimeError: The other ranks did not, within ``TIMEOUT``.
        """
        whole = own.new_empty(self.whole_sizes[index], device="cpu")
        whole[self._parts[index]] = own
        if self.num_ranks == 1:
            return whole.to(own.device)
        assert self._host_ranks is not None
        try:
            group = self._host_ranks.connected()
            for rank in range(self.num_ranks):
                part = whole[self._part(index, rank)]
                if part.numel():
                    torch.distributed.broadcast(part, group=group, group_src=rank)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} of this group asked for global parameters, of which each of "
                f"its {self.num_ranks} ranks holds a share, and the others have not given theirs "
                f"({error}). Call state_dict() of the model while it trains, and what else reads "
                "global parameters, on all ranks and not on one alone"
            ) from error
        return whole.to(own.device)
