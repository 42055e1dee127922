"""Digests of samples, with which replica groups find that they train on the same ones."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_BATCHES = 4
"""How many of a group's first batches are compared, all before its first sync: later the groups are
at different positions. One batch alone may be equal by chance, if it is a single sample of a small
dataset."""

MAX_NUMBERS = 2**20
"""How many numbers of a tensor are compared, so that little is copied from an accelerator."""


class FirstBatches:
    """Digests of this group's first batches, until they have been compared with other groups'."""

    def __init__(self) -> None:
        self._digests: list[str] | None = []

    def note(self, batch: Any) -> None:
        """Add a batch, if it is one of the first ``NUM_BATCHES``."""
        if self._digests is not None and len(self._digests) < NUM_BATCHES:
            self._digests.append(digest_of_samples(batch))

    def number(self) -> int:
        """Return a number above 0 for the content of all of them; 0 if there is nothing to compare.

        It is 0 too if something in a batch cannot be pickled.
        """
        if not self._digests or not all(self._digests):
            return 0
        return as_number(digest_of_samples(self._digests))

    def were_compared(self) -> None:
        """Note no more batches: later the groups are at different positions."""
        self._digests = None


def as_number(digest: str) -> int:
    """60 bits of a digest in hex, as a number above 0."""
    return int(digest[:15], 16) + 1


def digest_of_samples(samples: Any) -> str:
    """SHA-256, in hex, of the content of samples. It is the same in every process and machine.

    Args:
        samples: Tensors and arrays in any containers, and what else can be pickled.

    Returns:
        The digest; empty if something in the samples cannot be pickled.
    """
    digest = hashlib.sha256()
    file: Any = SimpleNamespace(write=digest.update)
    writer = _ContentWriter(file, protocol=4)
    writer.fast = True  # by content alone: not by which parts are the same object
    # Pickling raises errors of any class; what cannot be pickled is not compared.
    with contextlib.suppress(Exception):
        writer.dump(samples)
        return digest.hexdigest()
    return ""


class _ContentWriter(pickle.Pickler):
    """Pickles tensors and arrays as their numbers: without device, strides and library versions.

    Sets are pickled as their elements' digests: their order is another one in each process.
    """

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, set | frozenset):
            return None
        digests = sorted(map(digest_of_samples, value))
        if "" in digests:
            raise pickle.PicklingError("an element of a set cannot be pickled")
        return type(value).__name__, digests

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            kind = str(value.dtype)
            numbers = value.detach().flatten()[:MAX_NUMBERS].cpu().contiguous()
            content = numbers.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            kind = value.dtype.str
            content = value.tobytes()
        else:
            return NotImplemented
        head = f"{kind} {[*value.shape]} "
        return bytes, (head.encode() + content,)
