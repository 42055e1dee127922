"""One answer for all ranks of a replica group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")


def broadcast(value: Any) -> Any:
    """Give every rank of the group the value of rank 0. A collective, if there are several."""
    if not dist.is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def ask_on_rank_0(ask: Callable[[], Answer]) -> Answer:
    """Call a function on rank 0, and give every rank its result.

    Every rank gets its error too, so that none waits for another one.

    Raises:
        Exception: Rank 0's.
    """
    answer: Any = None
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer = ask()
        except Exception as raised:
            error = raised
    answer, error = broadcast((answer, error))
    if error is not None:
        raise error
    return answer
