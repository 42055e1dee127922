"""How a checkpoint stores the tensors of a group's ranks, and which of them have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_replication.diloco.shards import local_tensor
from composer_replication.group.global_weights import as_dtensor

CHUNK = 1 << 17
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_SHIFT = (1 << 31) + 1
"""Added to every number, so that a number and its negative have different squares."""


class BadStateError(ValueError):
    """A checkpoint from which this group cannot continue."""


class CheckpointLayout:
    """How the tensors of a group's ranks are stored in its checkpoint.

    Args:
        fragments: The model's parameters and buffers in each fragment, by name.
        is_sharded: Whether each rank writes its shards (DCP), or rank 0 writes whole tensors.
        has_averages: Whether the saved model may hold other weights than the global ones.
    """

    def __init__(
        self,
        fragments: Sequence[Mapping[str, Tensor]],
        is_sharded: bool,
        has_averages: bool = False,
    ) -> None:
        self.fragments = [list(fragment) for fragment in fragments]
        self.live = {name: t for fragment in fragments for name, t in fragment.items()}
        self.is_sharded = is_sharded
        self.theta_beside = [
            name for name, t in self.live.items() if has_averages or t.dtype != torch.float32
        ]
        """The global parameters that are saved beside the model."""

    @property
    def first_names(self) -> list[str]:
        """The name of the first tensor in each fragment."""
        return [names[0] for names in self.fragments]

    def check_cut(self, saved: Sequence[str]) -> None:
        """Check that a checkpoint has the same parameters in each fragment.

        Args:
            saved: What ``first_names`` was.

        Raises:
            BadStateError: It was saved with another cut, which its counts per fragment are of.
        """
        pairs = zip(saved, self.first_names, strict=True)
        for index, (theirs, mine) in enumerate(pairs):
            if theirs != mine:
                raise BadStateError(
                    f"its fragment {index} begins with {theirs}, and with {mine} here: the model's "
                    "blocks have changed. Continue with the model's code, and the version of "
                    "composer-replication, that wrote it"
                )

    def save(self, name: str, shard: Tensor) -> Tensor:
        """Return what the checkpoint stores of a tensor. A collective if it has to be gathered."""
        like = self.live[name]
        if not isinstance(like, DTensor):
            return shard.detach()
        return as_dtensor(shard.detach(), like) if self.is_sharded else self.save_whole(name, shard)

    def load(self, name: str, saved: object) -> Tensor:
        """Return this rank's part of what ``save`` returned, on any number of ranks.

        Raises:
            BadStateError: It is missing, or has another shape than in the model.
        """
        like = self.live[name]
        if not isinstance(saved, Tensor) or saved.shape != like.shape:
            what = f"is {tuple(saved.shape)}" if isinstance(saved, Tensor) else "is missing"
            raise BadStateError(f"{name} {what} in it, and {tuple(like.shape)} in the model")
        if isinstance(saved, DTensor):
            return saved.to_local()
        if not isinstance(like, DTensor):
            return saved
        mesh, placements = like.device_mesh, like.placements
        on_device = saved.to(mesh.device_type)
        return distribute_tensor(on_device, mesh, placements, src_data_rank=None).to_local()

    def save_whole(self, name: str, shard: Tensor) -> Tensor:
        """Return the whole tensor in rank 0's host memory, empty elsewhere. A collective."""
        like = self.live[name]
        if not isinstance(like, DTensor):
            return shard.detach()
        whole = as_dtensor(shard.detach(), like).full_tensor()
        return whole.cpu() if torch.distributed.get_rank() == 0 else whole.new_empty(0)


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
    """Whether this rank adds its shard: of the ranks that hold the same shard, only one does."""
    if not isinstance(tensor, DTensor):
        return torch.distributed.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank of the group is in the mesh of its model"
    return not any(
        placement.is_replicate() and rank
        for placement, rank in zip(tensor.placements, coordinate, strict=True)
    )
