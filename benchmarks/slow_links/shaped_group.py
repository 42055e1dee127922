"""One replica group of ``bandwidth.py``, in a network namespace of its own.

Started as ``python -m benchmarks.slow_links.shaped_group RANK PARAMS FD``: it answers the commands
of ``group_commands.py`` that come over the socket FD, one answer each, until that is closed.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
import traceback
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_replication import DiLoCo
from composer_replication.replica.lighthouse import start_lighthouse

from .group_commands import (
    BytesSent,
    Failed,
    Join,
    Leave,
    Method,
    Probe,
    Round,
    Steps,
    Taken,
    TimeSteps,
)
from .link_probe import receive_probe, send_probe
from .links import Endpoint

from composer_replication.replica.factory import make_manager  # isort: skip

GROUPS = 2
BLOCKS = 24
TIMEOUT_S = 120.0
ALPHA = 0.5
"""``fragment_update_alpha`` of a sync with a delay, as in arXiv 2501.18512."""


class Group:
    """A model in training, and the visits it makes to the other group.

    Args:
        rank: 0 or 1.
        params: Parameters of the model, about.
    """

    def __init__(self, rank: int, params: int) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        torch.manual_seed(rank)
        self.rank = rank
        self._width = round((params / BLOCKS) ** 0.5)
        blocks = [
            nn.Sequential(nn.Linear(self._width, self._width), nn.ReLU()) for _ in range(BLOCKS)
        ]
        self._model = nn.Sequential(*blocks)
        self.params = sum(parameter.numel() for parameter in self._model.parameters())
        self._trained: nn.Module = self._model
        self._optimizer = self._optimizer_of(self._model)
        self._set_batch(16)
        self._end: Endpoint | None = None
        self._method: Method | None = None
        self._diloco: DiLoCo | None = None
        self._visit = ExitStack()

    @staticmethod
    def _optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def _set_batch(self, batch: int) -> None:
        self._inputs = torch.randn(batch, self._width)
        self._targets = self._inputs.roll(1, dims=1)

    def _step(self) -> None:
        loss = (self._trained(self._inputs) - self._targets).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def answer(self, command: object) -> object:
        """Do what a command says."""
        match command:
            case Probe(end, num_bytes):
                return (receive_probe if self.rank else send_probe)(end, num_bytes)
            case TimeSteps(batch, count):
                self._set_batch(batch)
                return min(self._steps(1).seconds for _ in range(count))
            case Steps(count):
                return self._steps(count)
            case Join(end, port, method):
                self._join(end, port, method)
            case Round(trains):
                return self._round(trains)
            case BytesSent():
                return 0 if self._end is None else self._end.bytes_sent
            case Leave():
                self._visit.close()
                gc.collect()
            case _:
                raise ValueError(f"command={command!r}: there is none such")
        return None

    def _steps(self, count: int) -> Taken:
        """Inner steps without any communication."""
        if self._diloco is not None:
            self._diloco.counts_steps = False
        with ExitStack() as stack:
            if isinstance(self._trained, DistributedDataParallel):
                stack.enter_context(self._trained.no_sync())
            began = time.perf_counter()
            for _ in range(count):
                self._step()
            taken = Taken(count, time.perf_counter() - began)
        if self._diloco is not None:
            self._diloco.counts_steps = True
        return taken

    def _join(self, end: Endpoint, port: int, method: Method) -> None:
        """Meet the other group, under a lighthouse of this visit's own: one that has been used
        waits for the groups of the visit before."""
        os.environ["GLOO_SOCKET_IFNAME"] = end.device
        self._end, self._method = end, method
        if method.name == "DDP":
            self._join_ddp(end, port)
            return
        if self.rank == 0:
            lighthouse = start_lighthouse(bind=f"{end.address}:{port}", min_replicas=GROUPS)
            self._visit.callback(lighthouse.shutdown)
        manager = make_manager(
            replica_id=f"group{self.rank}",
            lighthouse_addr=f"http://{end.first_address}:{port}",
            min_replica_size=GROUPS,
            timeout=TIMEOUT_S,
            hostname=end.address,
            token="local",
        )
        self._visit.callback(manager.shutdown)
        self._diloco = DiLoCo(
            manager,
            self._model,
            self._optimizer,
            sync_every=method.sync_every,
            schedule=[],
            num_fragments=method.num_fragments,
            fragment_sync_delay=method.fragment_sync_delay,
            fragment_update_alpha=ALPHA if method.fragment_sync_delay else 0.0,
            num_replicas=GROUPS,
            wire_format=method.wire_format,
        )
        self._visit.callback(setattr, self, "_diloco", None)
        self._visit.enter_context(self._diloco)

    def _join_ddp(self, end: Endpoint, port: int) -> None:
        address = f"tcp://{end.first_address}:{port}"
        dist.init_process_group("gloo", init_method=address, rank=self.rank, world_size=GROUPS)
        self._visit.callback(dist.destroy_process_group)
        own = self._trained, self._optimizer
        self._visit.callback(self._put_back, *own)
        self._trained = DistributedDataParallel(copy.deepcopy(self._model))
        self._optimizer = self._optimizer_of(self._trained)
        self._step()  # after it the buckets are built

    def _put_back(self, trained: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._trained, self._optimizer = trained, optimizer

    def _round(self, trains: bool) -> Taken:
        """The inner steps of one round, and the syncs in it."""
        assert self._method is not None, "joined"
        if self._diloco is None:
            began = time.perf_counter()
            self._step()
            return Taken(1, time.perf_counter() - began)
        began = time.perf_counter()
        for _ in range(self._method.sync_every):
            if trains:
                self._step()
            else:
                self._optimizer.step()
        seconds = time.perf_counter() - began
        reports = self._diloco.pop_finished_syncs()
        if len(reports) != self._method.num_fragments:
            raise RuntimeError(
                f"{len(reports)} syncs committed in a round, not {self._method.num_fragments}"
            )
        stood_still_s = sum(report.sync_seconds for report in reports)
        waited_s = sum(report.wait_seconds for report in reports)
        return Taken(self._method.sync_every, seconds, stood_still_s, waited_s)


def serve(rank: int, params: int, fd: int) -> None:
    """Answer commands until the other end is closed."""
    connection: Connection[Any, Any] = Connection(fd)
    group = Group(rank, params)
    connection.send(group.params)
    while True:
        try:
            command = connection.recv()
        except EOFError:
            os._exit(0)  # whatever is still under way: the parent is gone, or wants this
        try:
            answer = group.answer(command)
        except Exception:
            answer = Failed(traceback.format_exc())
        connection.send(answer)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
