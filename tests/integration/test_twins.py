"""Groups of several ranks by ``make_manager()`` alone, and two groups with one replica id.

Run: pytest -m integration tests/integration/test_twins.py. Real processes, a real lighthouse, real
gloo inside and between the groups.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import TinyMLP, batch, mse, plain_sgd
from integration.replicas import Group, run_groups

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.replica.factory import make_manager
from composer_replication.replica.options import DuplicateIdError

pytestmark = pytest.mark.integration


def train(process: Group, name: str, steps: int, step_s: float = 0.0, **start: Any) -> Any:
    """The digest, the outer steps and the most groups in a sync; or the error that ends it."""
    manager = make_manager(replica_id=name, lighthouse_addr=process.lighthouse_addr, timeout=20.0)
    model = TinyMLP(width=15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = dist.group.WORLD if dist.is_initialized() else None
    try:
        with DiLoCo(manager, model, optimizer, plain_sgd(), 2, ranks=ranks, **start) as diloco:
            participants = 0
            for step in range(steps):
                optimizer.zero_grad()
                mse(model, *batch(process.replica_id, step)).backward()
                optimizer.step()
                participants = max(participants, manager.num_participants())
                if step == 3:
                    process.signal.set()
                time.sleep(step_s)
            return diloco.global_digest(), diloco.outer_step, participants
    except DuplicateIdError as error:
        return str(error)
    finally:
        manager.shutdown()


def two_ranks(process: Group, folder: str) -> Any:
    name, rank = "ab"[process.replica_id // 2], process.replica_id % 2
    init = f"file://{folder}/group_{name}"
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=limit)
    return train(process, name, 6, num_replicas=2)


def test_the_ranks_and_the_store_of_a_group_come_from_torch_distributed(tmp_path: Path):
    results = run_groups(two_ranks, 4, folder=str(tmp_path))
    assert len(set(results)) == 1
    assert results[0][1:] == (3, 2)  # and not 4: two groups of two ranks


def with_a_twin(process: Group) -> Any:
    """a and b train; then somebody starts a again."""
    if process.replica_id == 2:
        process.signal.wait(30)
        return train(process, "a", 2)
    return train(process, "ab"[process.replica_id], 40, 0.1, num_replicas=2)


def test_a_second_group_of_one_name_leaves_by_name_and_disturbs_nobody():
    first, peer, twin = run_groups(with_a_twin, 3)
    assert twin.startswith("replica_id='a' is taken: a living replica group on ")
    assert first == peer and first[1:] == (20, 2)
