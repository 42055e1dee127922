"""Digests of samples, by which replica groups find that they train on equal ones."""

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
"""How many batches of a group are compared, of those before its first sync: what it reads later is
not at the same position as what the others read. One alone may be equal by chance, if it is a
single sample of a small dataset."""

MAX_NUMBERS = 2**20
"""The numbers of a tensor that count, so that little is copied from an accelerator."""


def digest_of(samples: Any) -> str:
    """SHA-256, in hex, of the content of samples. It is the same in every process and machine.

    Args:
        samples: Tensors and arrays in any containers, and what else can be pickled.

    Returns:
        The digest; empty if something in the samples cannot be pickled.
    """
    digest = hashlib.sha256()
    file: Any = SimpleNamespace(write=digest.update)
    writer = _ContentWriter(file, protocol=4)
    writer.fast = True  # by content alone, whatever is the same object
    with contextlib.suppress(Exception):  # of any class: what cannot be pickled is not compared
        writer.dump(samples)
        return digest.hexdigest()
    return ""


class _ContentWriter(pickle.Pickler):
    """Pickles tensors and arrays as their numbers: without device, strides and library versions."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            numbers = value.detach().flatten()[:MAX_NUMBERS].cpu().contiguous()
            kind, content = str(value.dtype), numbers.view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            kind, content = value.dtype.str, value.tobytes()
        else:
            return NotImplemented
        return bytes, (f"{kind} {[*value.shape]} ".encode() + content,)
