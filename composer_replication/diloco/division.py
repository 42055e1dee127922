"""What this rank has of a fragment, if its replica group has several ranks.

Under FSDP2 a rank holds a shard of each tensor. Under DDP all ranks hold the same, and share the
work of a sync: each has a part of the flat buffer over all tensors, its *share*.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

BUCKET = 2**24
"""Largest number of elements in a message: 64 MiB of fp32. It never changes a result."""

TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for the shares of the others when a whole tensor is asked for."""


def held_tensor(parameter: Tensor) -> Tensor:
    """Return a parameter's storage on this rank: of a DTensor (FSDP2) this rank's shard."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return held.detach()


def count_shards(tensor: Tensor) -> int:
    """Return into how many shards a tensor is divided; 1 if every rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    count = 1
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            count *= tensor.device_mesh.size(dimension)
    return count


def connect_hosts(ranks: ProcessGroup) -> ProcessGroup:
    """Connect a second process group over the ranks of a replica group, for tensors in host memory.

    A rank that asks for whole tensors alone must not disturb the process group in which they train.
    It is a collective of the ranks.
    """
    members = torch.distributed.get_process_group_ranks(ranks)
    group = torch.distributed.new_group(
        members, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True
    )
    assert group is not None, "this rank is one of them"
    return group


class Division:
    """How tensors that lie one after the other are divided among the ranks of a group.

    Without other ranks it holds all of them, and nothing is sent. With other ranks ``sum``,
    ``level``, ``gather``, ``gathered``, ``whole`` and ``digest`` may be collectives: all ranks of
    the group call them in the same order, and get the same result.

    Each rank averages what it holds with the same rank of the other groups. So the traffic between
    groups does not grow with their ranks. Ranks with shares then gather the result over the fast
    network inside the group.

    Args:
        tensors: The model's tensors on this rank.
        ranks: All ranks of the group; None for a single rank.
        are_held: Whether the ranks hold shards (FSDP2), and not the same tensors. Several ranks may
            hold the same shard, as in a mesh that shards in one dimension and replicates in the
            other (HSDP).
        connect: Connects a process group over the same ranks, for whole tensors: when the first one
            is asked for, and not when ``DiLoCo`` is built. A rank can fail before that, for example
            because the run rejects it, and the others would wait for it.

    Attributes:
        num_ranks: How many ranks the group has.
        whole_sizes: Elements of each tensor, or of its shard if the ranks hold shards.
        parts: Which elements of each tensor are in this rank's share.
        sizes: How many these are.
        num_shares: The number of shares into which all elements are divided.
        share: How many elements a share has. All are equally large, so the last may have padding.
        padded: Elements of memory for all shares.
        place: This rank's share in it.
        copies: How many ranks hold the same elements of each tensor.
        bucket: Largest number of elements in a message.

    Raises:
        ValueError: A tensor is divided among other ranks than ``ranks``.
    """

    ALIGNMENT = 16

    def __init__(
        self,
        tensors: Iterable[Tensor],
        ranks: ProcessGroup | None = None,
        *,
        are_held: bool = False,
        connect: Callable[[ProcessGroup], ProcessGroup] = connect_hosts,
    ) -> None:
        tensors = list(tensors)
        self._ranks = ranks
        self._connect = connect
        self._rank = 0
        self.num_ranks = 1
        if ranks is not None:
            self._rank = ranks.rank()
            self.num_ranks = ranks.size()
        self.are_held = are_held
        self._device = tensors[0].device
        self.copies: list[int] = []
        for tensor in tensors:
            count = count_shards(tensor) if are_held else self.num_ranks
            if self.num_ranks % count:
                raise ValueError(
                    f"a parameter is divided into {count} shards, and ranks has {self.num_ranks} "
                    "ranks: pass the process group of all ranks of this replica group as ranks"
                )
            self.copies.append(self.num_ranks // count)
            if isinstance(tensor, DTensor):
                # With FSDP2's CPU offload the shards are on the CPU, and the ranks' backend may not
                # be able to reduce tensors there.
                self._device = torch.device(tensor.device_mesh.device_type)

        self.bucket = BUCKET
        self.whole_sizes = [held_tensor(tensor).numel() for tensor in tensors]
        self._firsts = [*itertools.accumulate(self.whole_sizes, initial=0)]
        # Shards are one share: each rank has another one, and all of it.
        self.num_shares = 1 if are_held else self.num_ranks
        unit = self.ALIGNMENT if self.num_shares > 1 else 1
        units = math.ceil(self._firsts[-1] / (self.num_shares * unit))
        self.share = units * unit
        self.padded = self.share * self.num_shares
        number = 0 if are_held else self._rank
        start = number * self.share
        self.place = slice(start, start + self.share)
        self.parts = [self._part(index, number) for index in range(len(tensors))]
        self.sizes = [part.stop - part.start for part in self.parts]

    def _part(self, index: int, rank: int) -> slice:
        """The elements of a tensor that are in the share of a rank."""
        size = self.whole_sizes[index]
        begin = rank * self.share - self._firsts[index]
        end = begin + self.share
        begin = max(0, min(size, begin))
        end = max(0, min(size, end))
        return slice(begin, end)

    def part_of(
        self,
        index: int,
        tensor: Tensor,
    ) -> Tensor:
        """This rank's part of one tensor, 1-D: a view, or a copy if the tensor is scattered."""
        return tensor.reshape(-1)[self.parts[index]]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks of the group."""
        if self._ranks is None:
            return value
        total = value.to(self._device, copy=True)
        torch.distributed.all_reduce(total, group=self._ranks)
        return total

    @torch.no_grad()
    def level(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the first rank's values of tensors that each holds whole, such as buffers.

        DDP does that before the next forward pass only, and FSDP2 never.
        """
        if self._ranks is None:
            return
        for tensor in tensors:
            flat = tensor.detach().reshape(-1)
            message = flat.view(torch.uint8).to(self._device)
            torch.distributed.broadcast(
                message,
                group=self._ranks,
                group_src=0,
            )
            values = message.view(tensor.dtype)
            tensor.copy_(values.view(tensor.shape))

    def gather(self, flat: Tensor) -> None:
        """Fill in the shares of the other ranks."""
        if self.num_shares == 1:
            return
        shares = flat.view(self.num_shares, -1)
        for bucket in shares.split(self.bucket, dim=1):
            own = bucket[self._rank].to(self._device, copy=True)
            gathered = own.new_empty(bucket.numel())
            torch.distributed.all_gather_into_tensor(
                gathered,
                own,
                group=self._ranks,
            )
            bucket.copy_(gathered.view(bucket.shape))

    def gathered(self, own: Tensor) -> Tensor:
        """All elements without padding, given those of this rank's share."""
        if self.num_shares == 1:
            return own
        flat = own.new_zeros(self.padded)
        flat[self.place][: own.numel()] = own
        self.gather(flat)
        return flat[: self._firsts[-1]]

    def whole(
        self,
        index: int,
        own: Tensor,
    ) -> Tensor:
        """Gather all shares of one tensor, 1-D, given this rank's.

        Raises:
            RuntimeError: The other ranks did not call it, within ``TIMEOUT``.
        """
        assert self._ranks is not None, "they share the tensor"
        whole = own.new_empty(self.whole_sizes[index], device="cpu")
        whole[self.parts[index]] = own
        try:
            group = self._connect(self._ranks)
            for rank in range(self.num_shares):
                part = whole[self._part(index, rank)]
                if part.numel():
                    torch.distributed.broadcast(part, group=group, group_src=rank)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} of this group asked for global parameters, of which each of "
                f"its {self.num_shares} ranks holds a share, and the others have not given theirs "
                f"({error}). Call state_dict() of the model while it trains, and what else reads "
                "global parameters, on all ranks and not on one alone"
            ) from error
        return whole.to(own.device)

    def digest(self, own: str) -> str:
        """The SHA-256 over the digests of all ranks, if they hold shards; else the rank's own.

        Args:
            own: The SHA-256 of what this rank holds, in hex.
        """
        if not self.are_held:
            return own
        digests = [own] * self.num_ranks
        torch.distributed.all_gather_object(
            digests,
            own,
            group=self._ranks,
        )
        content = bytes.fromhex("".join(digests))
        return hashlib.sha256(content).hexdigest()
