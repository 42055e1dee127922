"""Checksums of a model's tensors: which of them have changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_replication.diloco.shards import local_tensor

CHUNK = 1 << 17
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SHIFT = (1 << 31) + 1
"""Added to every number, so that a number and its negative have different squares."""


def checksums(
    live: Mapping[str, Tensor], held: Callable[[str], Tensor] | None = None
) -> dict[str, int]:
    """Return a checksum of each tensor, the same on all ranks and for any number of ranks.

    It is a sum over the numbers of a tensor, so the ranks can add the sums over their shards. The
    numbers are squared, since two sums of plain numbers may be equal by chance. The checksum tells
    different tensors apart, but does not resist somebody who constructs two with the same checksum.

    With sharded tensors it is a collective of all ranks.

    Args:
        live: The model's tensors by name. They define how each tensor is divided among the ranks.
        held: Returns this rank's shard of the tensor to sum, by name. None: sum the tensors of
            ``live`` themselves.
    """
    meshes = [tensor.device_mesh for tensor in live.values() if isinstance(tensor, DTensor)]
    sums = []
    for name, tensor in live.items():
        own = local_tensor(tensor) if held is None else held(name)
        sums.append(_checksum(own) if not meshes or _adds_its_part(tensor) else 0)
    if meshes:
        together = torch.tensor(sums, dtype=torch.int64, device=meshes[0].device_type)
        torch.distributed.all_reduce(together)
        sums = together.tolist()
    return dict(zip(live, sums, strict=True))


def replaced(sums: Mapping[str, int], live: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that have changed since ``checksums`` gave these sums."""
    return [name for name, checksum in checksums(live).items() if checksum != sums.get(name)]


def _checksum(tensor: Tensor) -> int:
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(CHUNK):  # limits the memory of the copies
        shifted = chunk.to(torch.int64, copy=True).add_(_SHIFT)
        total += shifted.mul_(shifted).sum()  # modulo 2^64
    return int(total)


def _adds_its_part(tensor: Tensor) -> bool:
    """Whether this rank adds its shard. Of the ranks that hold the same shard only one does."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the group is in the mesh of its model"
    return not any(
        placement.is_replicate() and rank
        for placement, rank in zip(tensor.placements, coordinate, strict=True)
    )
