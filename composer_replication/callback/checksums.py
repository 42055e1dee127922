"""Checksums that show which tensors of a model are those of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_replication.diloco.fragments import listed
from composer_replication.diloco.shards import local_tensor

log = logging.getLogger(__name__)

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


def not_loaded(saved: Mapping[str, int] | None, live: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of tensors that differ from the checkpoint, and log a warning.

    Args:
        saved: The checksums in the checkpoint. None: the version that wrote it had none.
        live: The model's tensors by name.
    """
    if saved is None:
        return frozenset()
    kept = [name for name, checksum in checksums(live).items() if checksum != saved.get(name)]
    if kept:
        log.warning(
            "%d of %d tensors of the model are not the checkpoint's: left out of the load "
            "(load_ignore_keys), or replaced since. Their values are kept and become global "
            "parameters, and their outer momentum is reset. A sync in flight that contains them "
            "is dropped. All replica groups must have the same values: %s",
            len(kept),
            len(live),
            listed(kept),
        )
    return frozenset(kept)


def _checksum(tensor: Tensor) -> int:
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(CHUNK):  # limits the memory of the copies
        shifted = chunk.to(torch.int64, copy=True).add_(_SHIFT)
        total += shifted.mul_(shifted).sum()  # modulo 2^64
    return int(total)


def _adds_its_part(tensor: Tensor) -> bool:
    """Whether this rank adds its shard: of the ranks that hold the same shard, only one does."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the group is in the mesh of its model"
    return not any(
        placement.is_replicate() and rank
        for placement, rank in zip(tensor.placements, coordinate, strict=True)
    )
