"""A reusable fp32 buffer whose pages the kernel may reclaim between syncs (MADV_FREE)."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Return memory that is filled with zeros, in huge pages where the system has them.

    A ``bytearray`` would be written once more when it is made, and would fault in 4 KB at a time.
    """
    size = max(1, num_bytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel was built without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class FlatMemory:
    """An fp32 buffer that is reused from sync to sync.

    On a CPU, page faults in fresh memory take several times as long as the sync's arithmetic, and a
    buffer that is kept costs as much memory as the model. Between syncs the kernel may therefore
    reclaim its pages (``MADV_FREE``); it does so only when memory is short. With huge pages this
    costs nothing; with 4 KB pages the next write takes a tenth longer. The buffer is not pinned,
    because pinned pages cannot be reclaimed.

    Args:
        device: Where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._can_be_lent = device.type == "cpu" and hasattr(mmap, "MADV_FREE")
        self._pages: mmap.mmap | None = None
        self._spare = Tensor()

    def take(self, num_elements: int) -> Tensor:
        """Return the buffer, 1-D and uninitialised, or a new one.

        It is new if the last one had another size or has not been given back: an allreduce that was
        abandoned may still write into it.
        """
        if not self._can_be_lent or not num_elements:
            return torch.empty(num_elements, device=self._device)
        taken = self._spare
        self._spare = Tensor()
        if taken.numel() != num_elements:
            self._pages = fresh_pages(4 * num_elements)
            taken = torch.frombuffer(self._pages, dtype=torch.float32)
        return taken

    def give_back(self, taken: Tensor) -> None:
        """Allow the kernel to reclaim the buffer. No allreduce may still use it."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_FREE)
            self._spare = taken
