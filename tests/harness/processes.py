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
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from common import plain_sgd
from forked import begin_fork, context
from harness.groups import Group
from torch import nn

from composer_replication.replica.factory import make_manager
from composer_replication.replica.lighthouse import read_status, start_lighthouse
from composer_replication.replica.manager import ReplicaManager
from composer_replication.simulation.simulation import SimulatedReplica

PLAIN = plain_sgd()


@dataclass(frozen=True)
class Process:
    """What a group function gets: the process of a group, or of one of its ranks.

    Attributes:
        replica_id: Its place among the groups, from 0.
        num_replicas: How many groups there are.
        lighthouse_addr: Where they meet.
        signal: An event that all groups share, to put what they do into an order.
        over: Another one, after which nobody is needed any more.
    """

    replica_id: int
    num_replicas: int
    lighthouse_addr: str
    signal: Any
    over: Any

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

    @contextmanager
    def training(
        self,
        model: nn.Module,
        sync_every: int = 2,
        *,
        outer: Any = PLAIN,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[Group]:
        """A group in training over a real manager.

        Args:
            model: What is trained.
            sync_every: As for DiLoCo.
            outer: The outer optimizer, plain SGD with lr 1 unless another is given.
            options: Of the manager.
            **settings: As for ``Group``; all groups of the run are awaited, and each sync has a
                digest.
        """
        settings = {"num_replicas": self.num_replicas, "digest_every": 1} | settings
        with (
            self.manager(**options or {}) as manager,
            Group(self.member(manager), model, outer, sync_every=sync_every, **settings) as group,
        ):
            yield group

    def member(self, manager: Any) -> SimulatedReplica:
        """What a simulation passes to a replica function, with a real manager."""
        return SimulatedReplica(self.replica_id, self.num_replicas, manager)

    def wait_until_somebody_asks(self) -> None:
        """Until another group has asked the lighthouse for the next quorum."""
        while "only have 0 participants" in read_status(self.lighthouse_addr).situation:
            time.sleep(0.05)

    def of_rank(self, folder: str, ranks: int, timeout_s: float = 60.0) -> Process:
        """Make this process one rank of a group of several, which torch.distributed knows.

        Args:
            folder: One for the whole run.
            ranks: How many processes are a group, one after the other.
            timeout_s: How long a rank waits for the others in a collective, in seconds.

        Returns:
            The group; ``dist.get_rank()`` is this process's place in it.
        """
        number, rank = divmod(self.replica_id, ranks)
        os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "NODE_RANK": "0"}
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/group_{number}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        return replace(self, replica_id=number, num_replicas=self.num_replicas // ranks)

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
    events = context.Event(), context.Event()
    # By a name of our own: pytest imports a test file under one that other processes cannot.
    file = Path(inspect.getfile(group_fn))
    named = f"{file.parent.name}.{file.stem}", group_fn.__name__
    processes, connections = [], []
    try:
        for replica_id in range(num_replicas):
            ours, theirs = context.Pipe()
            group = Process(replica_id, num_replicas, lighthouse.address(), *events)
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
    named: tuple[str, str], group: Process, arguments: dict[str, Any], parent: Connection
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
