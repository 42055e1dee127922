"""Memory of a model's size: dear when fresh, and not to be kept."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, in huge pages where the system has them.

    A ``bytearray`` would be written to once more, and all of it begun 4 KB at a time.
    """
    pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that is built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class FlatMemory:
    """fp32 memory of one size, used again from sync to sync.

    On a CPU fresh memory costs several times what is then done in it, and keeping it would cost a
    model's size. So between the syncs it is the system's to take (``MADV_FREE``): without a
    shortage it is still there for the next one. In huge pages this costs nothing; in small ones
    writing to it again takes a tenth longer. It is not pinned: pinned memory cannot be taken.

    Args:
        num_elements: How many.
        device: Where.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self.num_elements = num_elements
        self._device = device
        is_on_cpu = device.type == "cpu"
        self._can_be_lent = is_on_cpu and hasattr(mmap, "MADV_FREE") and num_elements > 0
        self._pages: mmap.mmap | None = None
        self._spare: Tensor | None = None

    def take(self) -> Tensor:
        """Uninitialised, 1-D. What was taken before and not given back is left alone."""
        if not self._can_be_lent:
            return torch.empty(self.num_elements, device=self._device)
        taken, self._spare = self._spare, None
        if taken is None:
            self._pages = fresh_pages(4 * self.num_elements)
            taken = torch.frombuffer(self._pages, dtype=torch.float32)
        return taken

    def give_back(self, taken: Tensor) -> None:
        """It is not needed any more, by nobody: no allreduce is under way in it."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_FREE)
            self._spare = taken
