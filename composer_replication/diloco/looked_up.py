"""Global parameters by name, looked up when they are asked for; and a digest of tensors by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from composer_replication.diloco.global_parameters import GlobalParameters


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256, in hex, over the bytes of tensors in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


class LookedUp(Mapping[str, Tensor]):
    """Global parameters by name, each gathered when it is asked for if the ranks share it.

    Args:
        homes: The global parameters of the fragment that each name belongs to.
    """

    def __init__(self, homes: Mapping[str, GlobalParameters]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> Tensor:
        return self._homes[name].whole(name)

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)
