"""Which tensors of a model are still those of the checkpoint that it was loaded from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from composer_replication.diloco.outer_optimizer import local_tensor

log = logging.getLogger(__name__)

CHUNK = 1 << 17
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SHIFT = (1 << 31) + 1
"""A number and its negative have other squares with it."""


def checksums(
    live: Mapping[str, Tensor], held: Callable[[str], Tensor] | None = None
) -> dict[str, int]:
    """A checksum of each tensor, the same on all ranks and for any number of them.

    It is a sum over the numbers of a tensor, so that the ranks' sums of their shards add up to it:
    of squares, since sums of the numbers themselves may well be equal by chance. It tells a tensor
    from another one, and is no proof against somebody who makes two with the same.

    With sharded tensors a collective of all ranks.

    Args:
        live: The model's tensors by name, which say how each lies on the ranks.
        held: Gives this rank's part of what is to be summed, by name. None: of the tensor itself.
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
    """The tensors that are not those of the checkpoint; a warning names them.

    Args:
        saved: The checksums that are in it. None: it is of a version that wrote none.
        live: The model's tensors by name.
    """
    if saved is None:
        return frozenset()
    kept = [name for name, found in checksums(live).items() if found != saved.get(name)]
    if kept:
        log.warning(
            "%d of %d tensors of the model are not the checkpoint's: left out of the load "
            "(load_ignore_keys), or replaced since. They stay as they are, are this group's part "
            "of the global model too, and their outer momentum begins anew. What of them was in "
            "flight is dropped. All replica groups must have them equal: %s%s",
            len(kept),
            len(live),
            ", ".join(kept[:6]),
            f" and {len(kept) - 6} more" if len(kept) > 6 else "",
        )
    return frozenset(kept)


def _checksum(tensor: Tensor) -> int:
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(CHUNK):  # so that no copy is larger than a chunk
        shifted = chunk.to(torch.int64, copy=True).add_(_SHIFT)
        total += shifted.mul_(shifted).sum()  # modulo 2^64
    return int(total)


def _adds_its_part(tensor: Tensor) -> bool:
    """Of several ranks that hold the same part of a tensor, one adds it."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the group is in the mesh of its model"
    return not any(
        placement.is_replicate() and place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
