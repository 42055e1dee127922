"""What is lent to the system between syncs. Run: pytest tests/diloco/averaging/test_flat_buffer.py

Real memory, and what the kernel says of it in ``/proc``.
"""

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from composer_replication.diloco.averaging import flat_buffer as flat_memory
from composer_replication.diloco.averaging.flat_buffer import FlatMemory, fresh_pages

NUM_ELEMENTS = 2**23  # 32 MiB


def lazily_free():
    """KiB that the system may take of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"LazyFree:\s+(\d+) kB", rollup)[1])


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="no MADV_FREE on this system")
def test_what_is_given_back_is_the_systems_to_take_until_it_is_written_to():
    gc.collect()  # other tests' memory
    memory, before = FlatMemory(torch.device("cpu")), lazily_free()
    taken = memory.take(NUM_ELEMENTS).fill_(1.0)
    assert lazily_free() - before < 1024
    memory.give_back(taken)
    assert lazily_free() - before == pytest.approx(4 * NUM_ELEMENTS // 1024, abs=4096)
    again = memory.take(NUM_ELEMENTS)
    assert again.data_ptr() == taken.data_ptr()
    again.fill_(2.0)
    assert lazily_free() - before < 4096


def test_what_has_not_been_given_back_is_left_alone():
    memory = FlatMemory(torch.device("cpu"))
    first = memory.take(1000).fill_(1.0)
    memory.take(1000).fill_(2.0)
    assert (first == 1.0).all()


def test_a_kernel_without_huge_pages_will_do(monkeypatch):
    class Pages(mmap.mmap):
        def madvise(self, *advice):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(flat_memory.mmap, "mmap", Pages)
    assert bytes(fresh_pages(8192)) == bytes(8192)
