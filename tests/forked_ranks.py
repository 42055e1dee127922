"""The ranks of one replica group, as real processes in a process group over gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from forked import context
from torch.distributed import ProcessGroup


def run_ranks(function: Callable[[int, ProcessGroup], None], num_ranks: int, folder: Path) -> None:
    """Call ``function(rank, world)`` in each rank; raises what one of them raises.

    Args:
        function: Of a module.
        num_ranks: How many.
        folder: Where they meet.
    """
    torch.multiprocessing.start_processes(
        _one_rank,
        (function, num_ranks, str(folder)),
        nprocs=num_ranks,
        start_method=context.get_start_method(),
    )


def _one_rank(rank: int, function: Callable[..., None], num_ranks: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    world = dist.group.WORLD
    assert world is not None
    function(rank, world)
    backend = world._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    del backend  # after all that has the group, or torch 2.7 may hang: see Gloo.abort
