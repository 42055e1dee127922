"""Collectives that give all ranks of a replica group the same value or the same error."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch.distributed as dist

from composer_replication.util.daemon_executor import DaemonExecutor

Answer = TypeVar("Answer")

POLL_S = 1.0
"""How long the other ranks wait at a time for what rank 0 awaits, in seconds."""


def rank() -> int:
    """This process's rank: the launcher's, until torch.distributed is initialized."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks in the group; from the same sources."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def broadcast(value: Any) -> Any:
    """Give every rank of the group the value of rank 0. With several ranks it is a collective."""
    if _is_alone():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks of the group. With several ranks it is a collective."""
    if _is_alone():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def ask_on_rank_0(ask: Callable[[], Answer]) -> Answer:
    """Call a function on rank 0, and give every rank its result.

    If the function raises, every rank raises that error. Without this the other ranks would wait
    for rank 0 in their next collective.

    Args:
        ask: A function without arguments, whose result can be pickled.

    Raises:
        Exception: The error that the function raised on rank 0.
    """
    answer: Any = None
    error: Exception | None = None
    if _is_alone() or dist.get_rank() == 0:
        try:
            answer = ask()
        except Exception as raised:
            error = raised
    answer, error = broadcast((answer, error))
    if error is not None:
        raise error
    return answer


def begin_on_rank_0(ask: Callable[[], Answer]) -> Future[Answer] | None:
    """Call a function on a thread of rank 0, for ``await_on_rank_0``; None on the other ranks."""
    return None if rank() else DaemonExecutor().submit(ask)


def await_on_rank_0(begun: Future[Answer] | None, note_wait: Callable[[], object]) -> Answer:
    """Give every rank what a function that has begun on rank 0 returns, or raise its error.

    It may take longer than a collective may: the ranks ask every ``POLL_S`` if it has ended.

    Args:
        begun: From ``begin_on_rank_0``.
        note_wait: Called every ``POLL_S``.
    """

    def answer() -> tuple[Answer] | None:
        assert begun is not None, "rank 0 has begun it"
        return (begun.result(),) if wait([begun], timeout=POLL_S).done else None

    while (answered := ask_on_rank_0(answer)) is None:
        note_wait()
    return answered[0]
