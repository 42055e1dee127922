"""``merge: rda`` in groups of two ranks each, which hold shares (DDP) or shards (FSDP2).

Run: pytest tests/integration/test_merge_ranks.py. Real processes, gloo, a lighthouse; both ranks of
a group train on the same samples, so that it should end as a group of one rank does.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import TinyMLP, batch, mse, plain_sgd
from integration.replicas import Group, run_groups
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from composer_replication import simulate
from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.outer_optimizer import OuterOptimizer, nesterov_sgd
from composer_replication.replica.factory import make_manager
from composer_replication.replica.process_group import host_store

pytestmark = pytest.mark.integration

RANKS, GROUPS = 2, 2
KINDS = {
    # Adam sees whole tensors on every rank, SGD this rank's share.
    "ddp": ("float32", nesterov_sgd(0.7, 0.9)),
    "ddp, adam": ("float32", lambda parameters: torch.optim.Adam(parameters, lr=0.05)),
    "ddp, int8": ("int8", plain_sgd()),
    "fsdp": ("float32", nesterov_sgd(0.7, 0.9)),
    "fsdp, int8": ("int8", plain_sgd()),
}


def train(
    manager: Any, model: nn.Module, group: int, wire_format: str, outer: OuterOptimizer, **own: Any
) -> dict[str, Tensor]:
    """The local parameters at the end, which are the global ones."""
    # Over gloo FSDP2 adds up gradients instead of averaging them, which Adam does not notice.
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-20)
    settings: dict[str, Any] = {"wire_format": wire_format, "merge": "rda", **own}
    with DiLoCo(manager, model, inner, outer, 3, num_replicas=GROUPS, **settings) as diloco:
        for step in range(13):  # the last one in mid-round
            inner.zero_grad()
            mse(model, *batch(group, step)).backward()
            inner.step()
        diloco.final_sync()
    parameters = ((name, p.detach()) for name, p in model.named_parameters())
    return {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in parameters}


def train_rank(process: Group, folder: str, kind: str) -> dict[str, Any]:
    group, rank = divmod(process.replica_id, RANKS)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group_{group}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    model, ranks = TinyMLP(width=15), dist.group.WORLD
    if kind.startswith("fsdp"):
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    store = host_store("localhost") if rank == 0 else None
    address: list[Any] = [(store.host, store.port) if store else None]
    dist.broadcast_object_list(address, src=0)
    manager = make_manager(
        replica_id=f"group_{group}",
        lighthouse_addr=process.lighthouse_addr,
        rank=rank,
        world_size=RANKS,
        store_addr=address[0][0],
        store_port=address[0][1],
        timeout=20.0,
        quorum_timeout=60.0,
    )
    manager.store = store
    ended = train(manager, model, group, *KINDS[kind], ranks=ranks)
    manager.shutdown()
    return {name: tensor.tolist() for name, tensor in ended.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_two_ranks_end_as_groups_of_one(kind: str, tmp_path: Path):
    alone = simulate(
        lambda sim: train(sim.manager, TinyMLP(width=15), sim.replica_id, *KINDS[kind]),
        num_replicas=GROUPS,
    )[0]
    processes = run_groups(train_rank, RANKS * GROUPS, folder=str(tmp_path), kind=kind)
    assert all(ended == processes[0] for ended in processes)
    # Shares of a rank are encoded by themselves, so int8 rounds other blocks.
    tolerance = 1e-5 if KINDS[kind][0] == "float32" else 0.02
    for name, tensor in alone.items():
        ended = torch.tensor(processes[0][name])
        assert float((ended - tensor).norm()) < tolerance * float(tensor.norm()), name
