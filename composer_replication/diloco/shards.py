"""A model that is sharded over the ranks of a replica group (FSDP2): its norms and digests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from composer_replication.diloco.averaging.rank_shares import take_first


def local_tensor(parameter: Tensor) -> Tensor:
    """The storage of a parameter on this rank: its shard where FSDP2 made it a DTensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def count_shards(tensor: Tensor) -> int:
    """Return into how many shards a tensor is divided; 1 if every rank holds all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh, placements = tensor.device_mesh, tensor.placements
    return math.prod(mesh.size(dim) for dim, p in enumerate(placements) if not p.is_replicate())


class Shards:
    """Computes norms and digests over the shards of all ranks of a group, equal on all ranks.

    Without sharding every rank holds the whole model, and nothing is sent. With sharding, ``norm``
    and ``digest`` are collectives: all ranks of the group call them, in the same order.

    Args:
        tensors: The model's tensors on this rank.
        ranks: All ranks of the group, if they hold shards; None without sharding. Several ranks may
            hold the same shard, as in a mesh that shards in one dimension and replicates in the
            other (HSDP).

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
        # With FSDP2's CPU offload the shards are on the CPU, and the ranks' backend may not be able
        # to reduce tensors there.
        sharded = (t.device_mesh.device_type for t in tensors if isinstance(t, DTensor))
        self._device = torch.device(next(sharded, None) or next(iter(tensors)).device)

    def own_part(self, square: Tensor, index: int) -> Tensor:
        """This rank's part of a sum of squares, divided by the ranks that hold the same shard.

        Args:
            square: The sum of squares over this rank's shard.
            index: The index of the tensor.
        """
        copies = self._copies[index] if self._copies else 1
        return square if copies == 1 else square / copies

    @property
    def are_held(self) -> bool:
        """Whether the ranks hold shards: then ``sum``, ``norm`` and ``digest`` are collectives."""
        return self._ranks is not None

    def sum(self, squares: Tensor) -> Tensor:
        """The sum over all ranks. With sharding, a collective.

        Args:
            squares: Of ``own_part`` of this rank's tensors.
        """
        if self._ranks is None:
            return squares
        total = squares.to(self._device, copy=True)
        torch.distributed.all_reduce(total, group=self._ranks)
        return total

    def norm(self, own: float) -> float:
        """The L2 norm over all shards. With sharding, a collective.

        Args:
            own: The square root of the sum of ``own_part`` over this rank's tensors.
        """
        return self.norms([own])[0]

    def norms(self, own: Sequence[float]) -> Sequence[float]:
        """Several of what ``norm`` gives, in one collective."""
        if self._ranks is None:
            return own
        return self.sum(torch.tensor(own, dtype=torch.float64).square()).sqrt().tolist()

    def level(self, tensors: Iterable[Tensor]) -> None:
        """See ``take_first``. With sharding, a collective."""
        if self._ranks is not None:
            take_first(tensors, self._ranks, self._device)

    def digest(self, own: str) -> str:
        """The SHA-256 over the digests of all ranks' shards. With sharding, a collective.

        Args:
            own: The SHA-256 of this rank's shards, in hex.
        """
        if self._ranks is None:
            return own
        digest = torch.frombuffer(bytearray.fromhex(own), dtype=torch.uint8).to(self._device)
        gathered = digest.new_empty(self._ranks.size() * digest.numel())
        torch.distributed.all_gather_into_tensor(gathered, digest, group=self._ranks)
        return hashlib.sha256(gathered.cpu().numpy().data).hexdigest()
