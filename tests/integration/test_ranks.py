"""The ranks of a group are of one mind about a lighthouse's restart. Run: pytest -m integration
tests/integration/test_ranks.py. Real processes, a real lighthouse, real gloo."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from integration.replicas import Group, run_groups
from integration.test_faults import MOVES, Lighthouse, Scalar

from composer_replication.replica import manager as replica_manager
from composer_replication.replica.lighthouse import LighthouseStatus, read_status
from composer_replication.replica.manager import ReplicaManager

pytestmark = pytest.mark.integration

RANKS = 2


def be_of_another_mind(rank: int, manager: ReplicaManager) -> None:
    """Rank 1 gives up on missing members at once; to rank 0 they live for two seconds."""
    manager._watch.missing.HEARTBEAT_WITHIN_S = 5.0 if rank == 0 else 0.0
    believes_from: list[float] = []

    def read_an_old_status(lighthouse_addr: str) -> LighthouseStatus:
        status = read_status(lighthouse_addr)
        believes_from.append(time.monotonic())
        if rank == 0 and believes_from[-1] - believes_from[0] < 2.0:
            return replace(status, alive=status.alive | manager._watch.missing.names)
        return status

    replica_manager.read_status = read_an_old_status  # type: ignore[assignment]


def train_ranks_through_a_restart(
    process: Group, address: str, folder: str
) -> list[tuple[Any, ...]]:
    """Three groups of two ranks; the last group dies with the lighthouse."""
    group = replace(process.of_rank(folder, RANKS), lighthouse_addr=address)
    rank, move = dist.get_rank(), MOVES[group.replica_id]
    with group.training(Scalar()) as run:
        be_of_another_mind(rank, run.manager)
        seen = run.steps(4, move, pause_s=0.1)
        if group.replica_id == 2:
            time.sleep(1.0)  # its last packets do not die with it
            Path(folder, f"dead {rank}").touch()
            group.kill()
        while not Path(folder, "restarted").exists():
            time.sleep(0.05)
        time.sleep(0.3 * process.replica_id)  # each asks at a time of its own
        return seen + run.steps(6, move, pause_s=0.1)


def test_ranks_that_are_not_of_one_mind_on_whom_to_await_use_a_quorum_all_or_none(tmp_path):
    lighthouse = Lighthouse()
    lighthouse.restart_when_dead(tmp_path, RANKS)
    try:
        *ranks, _, _ = run_groups(
            train_ranks_through_a_restart,
            num_replicas=3 * RANKS,
            killed=[4, 5],
            address=lighthouse.address,
            folder=str(tmp_path),
        )
    finally:
        lighthouse.kill()
    assert all(seen == ranks[0] for seen in ranks)
    assert [line[:2] for line in ranks[0]] == [(1, 3), (2, 3), (3, 2), (4, 2), (5, 2)]
