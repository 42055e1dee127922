"""Groups of other ranks or shards are refused in one line, before gloo could abort anybody.

Run: pytest -m integration tests/integration/test_unequal_ranks.py. Real processes, a real
lighthouse, real gloo inside and between the groups.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import TinyMLP, batch, mse
from harness.processes import Process, run_groups
from torch.distributed.fsdp import fully_shard

from composer_replication.settings import SettingsMismatch

pytestmark = pytest.mark.integration

PLACES = ["a0", "b0", "b1", "c0", "c1"]
"""Group and rank of each process: groups of one, two and two ranks."""


def place_of(process: Process, folder: str) -> Process:
    """The group of this process, whose ranks torch.distributed knows."""
    name, rank = PLACES[process.replica_id][0], int(PLACES[process.replica_id][1])
    ranks = sum(place[0] == name for place in PLACES)
    init = f"file://{folder}/group_{name}"
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=ranks, timeout=limit)
    return replace(process, replica_id="abc".index(name))


def train(group: Process, steps: int, step_s: float, is_sharded: bool = False) -> int:
    model = TinyMLP(width=15)
    if is_sharded:
        fully_shard(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = dist.group.WORLD if dist.get_world_size() > 1 else None
    with group.training(model, inner=inner, ranks=ranks, num_replicas=1) as run:
        for step in range(steps):
            inner.zero_grad()
            mse(model, *batch(group.replica_id, step)).backward()
            inner.step()
            if step == 3:
                group.signal.set()
            time.sleep(step_s)
        assert run.manager.num_participants() == 1, "nobody joins it"
        return run.diloco.outer_step


def refused(process: Process, folder: str, is_sharded: bool) -> tuple[str, float]:
    """The one line with which this rank is refused, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(SettingsMismatch) as caught:
        train(place_of(process, folder), 2, 0.0, is_sharded)
    return str(caught.value), time.monotonic() - began


def join_later(process: Process, folder: str) -> Any:
    """b trains with its model whole; then a wants to join with one rank, and c with shards."""
    if PLACES[process.replica_id][0] != "b":
        process.signal.wait(30)
        return refused(process, folder, PLACES[process.replica_id][0] == "c")
    return train(place_of(process, folder), 40, 0.2)


@pytest.mark.alone
def test_joiners_of_another_number_of_ranks_or_shards_are_refused_and_nobody_in_training_ends(
    tmp_path: Path,
):
    a0, b0, b1, *sharded = run_groups(join_later, len(PLACES), folder=str(tmp_path))
    assert b0 == b1 == 20
    assert a0[0].startswith(
        "this replica group's settings differ from those of replica group group_1, make them equal:"
        " ranks: 1 here, 2 there"
    )
    for line, _ in sharded:
        assert line == (
            "this replica group's settings differ from those of replica group group_1, make them "
            "equal: shards: 2 here, 1 there"
        )
    assert all(seconds < 10.0 for _, seconds in [a0, *sharded])
