"""Run a function as several replica groups: one real process each, over one real lighthouse."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forked import begin_fork, context

from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import start_lighthouse
from composer_replication.replica.manager import ReplicaManager


@dataclass(frozen=True)
class Group:
    """What a group function gets.

    Attributes:
        replica_id: Its place among the groups, from 0.
        num_replicas: How many groups there are.
        lighthouse_addr: Where they meet.
        signal: An event that all groups share, to put what they do into an order.
    """

    replica_id: int
    num_replicas: int
    lighthouse_addr: str
    signal: Any

    @contextmanager
    def manager(self, **options: Any) -> Iterator[ReplicaManager]:
        """A real manager for this group; it leaves at the end."""
        manager = make_manager(
            replica_id=f"group_{self.replica_id}",
            lighthouse_addr=self.lighthouse_addr,
            **{"timeout": 20.0} | options,
        )
        try:
            yield manager
        finally:
            manager.shutdown()

    def kill(self) -> None:
        """End this process as a power cut would."""
        os.kill(os.getpid(), signal.SIGKILL)


class GroupFailed(AssertionError):
    """A group function raised, or its process died; the message has the traceback."""


def run_groups(
    group_fn: Callable[..., Any],
    num_replicas: int = 2,
    *,
    killed: Collection[int] = (),
    timeout_s: float = 240.0,
    **arguments: Any,
) -> list[Any]:
    """Call ``group_fn(group, **arguments)`` in ``num_replicas`` processes at the same time.

    No process outlives this call. One that has returned stays until all have: like a machine that
    stays up after training, and unlike one whose last packets are lost with it.

    Args:
        group_fn: A function at the top of a module in a folder of the tests.
        num_replicas: How many groups.
        killed: Those that kill themselves, and so give no result.
        timeout_s: After how long to give up, in seconds.
        **arguments: The same for every group.

    Returns:
        What each call returned, in the order of the groups; None for those in ``killed``.

    Raises:
        GroupFailed: A group raised or died (unless in ``killed``), or the time is over.
    """
    lighthouse = start_lighthouse(heartbeat_timeout_ms=1_000)
    event = context.Event()
    # By a name of our own: pytest imports a test file under one that other processes cannot.
    file = Path(inspect.getfile(group_fn))
    named = f"{file.parent.name}.{file.stem}", group_fn.__name__
    processes, connections = [], []
    try:
        for replica_id in range(num_replicas):
            ours, theirs = context.Pipe()
            group = Group(replica_id, num_replicas, lighthouse.address(), event)
            process = context.Process(
                target=_serve, args=(named, group, arguments, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return _collect(connections, killed, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
        lighthouse.shutdown()


def _serve(
    named: tuple[str, str], group: Group, arguments: dict[str, Any], parent: Connection
) -> None:
    begin_fork()
    module, name = named
    try:
        group_fn = getattr(importlib.import_module(module), name)
        parent.send((True, group_fn(group, **arguments)))
    except BaseException:  # noqa: B036 - raised again in the test
        parent.send((False, traceback.format_exc()))
    parent.poll(None)  # until run_groups kills this process, or is gone itself


def _collect(connections: list[Connection], killed: Collection[int], deadline: float) -> list[Any]:
    results: list[Any] = [None] * len(connections)
    pending = {connection: index for index, connection in enumerate(connections)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise GroupFailed(f"groups {sorted(pending.values())} did not finish in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            index = pending.pop(connection)
            try:
                has_returned, value = connection.recv()
            except EOFError:
                if index in killed:
                    continue
                raise GroupFailed(f"the process of group {index} died") from None
            if not has_returned:
                raise GroupFailed(f"group {index} raised:\n{value}")
            results[index] = value
    return results
