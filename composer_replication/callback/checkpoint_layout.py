"""How the tensors of a replica group's ranks are stored in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_replication.callback.global_weights import as_dtensor


class BadStateError(ValueError):
    """A checkpoint from which this group cannot continue."""


class CheckpointLayout:
    """How the tensors of a group's ranks are stored in its checkpoint.

    Args:
        fragments: The model's parameters and buffers in each fragment, by name.
        is_sharded: Whether each rank writes its shards (DCP), or rank 0 writes whole tensors.
        has_averages: Whether the saved model may hold other weights than the global ones.
        tied: The name in ``fragments`` of a tied parameter, by each of its other names.
    """

    def __init__(
        self,
        fragments: Sequence[Mapping[str, Tensor]],
        is_sharded: bool,
        has_averages: bool = False,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.fragments = [list(fragment) for fragment in fragments]
        self.live = {name: t for fragment in fragments for name, t in fragment.items()}
        self.is_sharded = is_sharded
        self.tied = dict(tied or {})
        self.theta_beside = [
            name for name, t in self.live.items() if has_averages or t.dtype != torch.float32
        ]
        """The global parameters that are saved beside the model."""

    @property
    def first_names(self) -> list[str]:
        """The name of the first tensor in each fragment."""
        return [names[0] for names in self.fragments]

    def check_cut(self, saved: Sequence[str] | None) -> None:
        """Check that a checkpoint has the same parameters in each fragment.

        Args:
            saved: What ``first_names`` was. None: the version that wrote it did not save that.

        Raises:
            BadStateError: It was saved with another cut, which its counts per fragment are of.
        """
        pairs = zip(saved or [], self.first_names, strict=False)
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
