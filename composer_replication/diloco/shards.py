"""Which part of the model each rank of a replica group holds: under FSDP2 a shard of its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def count_shards(tensor: Tensor) -> int:
    """Into how many different parts the ranks divide a tensor; 1 if each has all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh, placements = tensor.device_mesh, tensor.placements
    return math.prod(mesh.size(dim) for dim, p in enumerate(placements) if not p.is_replicate())


class Shards:
    """Norms and digests over the shards of all ranks of a group, equal on all of them.

    Without shards every rank holds all, and knows the answer by itself. With them each method that
    says so is a collective: all ranks of the group call it, in the same order.

    Args:
        tensors: The model's on this rank.
        ranks: All ranks of the group, if they hold shards. Some may hold the same one, as the
            ranks of a mesh that shards in one dimension and replicates in the other do.

    Raises:
        ValueError: A tensor is divided among other ranks than ``ranks``.
    """

    def __init__(self, tensors: Collection[Tensor] = (), ranks: ProcessGroup | None = None) -> None:
        self._ranks = ranks
        self._copies: Sequence[int] = ()
        if ranks is None:
            return
        counts = [count_shards(tensor) for tensor in tensors]
        odd = next((count for count in counts if ranks.size() % count), None)
        if odd is not None:
            raise ValueError(
                f"a parameter is divided into {odd} shards, and ranks has {ranks.size()} ranks: "
                "pass the process group of all ranks of this replica group as ranks"
            )
        self._copies = [ranks.size() // count for count in counts]
        # With FSDP2's CPU offload the shards are on the CPU, and the ranks' backend is not.
        sharded = (t.device_mesh.device_type for t in tensors if isinstance(t, DTensor))
        self._device = torch.device(next(sharded, None) or next(iter(tensors)).device)

    def own_part(self, square: Tensor, place: int) -> Tensor:
        """This rank's part of a sum of squares over a tensor, of which others hold the same."""
        copies = self._copies[place] if self._copies else 1
        return square if copies == 1 else square / copies

    def norm(self, own: float) -> float:
        """The L2 norm over all shards; with shards a collective.

        Args:
            own: The root of what ``own_part`` gave of this rank's.
        """
        if self._ranks is None:
            return own
        square = torch.tensor(own, dtype=torch.float64).square().to(self._device)
        torch.distributed.all_reduce(square, group=self._ranks)
        return math.sqrt(float(square))

    def digest(self, own: str) -> str:
        """The SHA-256 over the digests of all ranks' shards; with shards a collective.

        Args:
            own: The SHA-256 of this rank's, in hex.
        """
        if self._ranks is None:
            return own
        given = torch.frombuffer(bytearray.fromhex(own), dtype=torch.uint8).to(self._device)
        gathered = given.new_empty(self._ranks.size() * given.numel())
        torch.distributed.all_gather_into_tensor(gathered, given, group=self._ranks)
        return hashlib.sha256(gathered.cpu().numpy().data).hexdigest()
