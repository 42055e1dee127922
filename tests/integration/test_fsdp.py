"""Replica groups of two FSDP2 ranks each, on CPUs. Run: pytest tests/integration/test_fsdp.py

Real: processes, ``fully_shard`` over gloo, the lighthouse and heals. Each process is one rank; a
tensor that two ranks cannot share equally makes their shards unequal.
"""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import TinyMLP, batch, mse
from integration.replicas import Group, run_groups
from torch.distributed.fsdp import fully_shard

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.process_group import host_store
from composer_replication.replica import make_manager

pytestmark = pytest.mark.integration

RANKS = 2


def shard_and_train(process: Group, folder: str) -> list[tuple[int, str]]:
    group, rank = divmod(process.replica_id, RANKS)
    if group == 2:  # it joins two others in training, and each of its ranks has another donor
        process.signal.wait(60)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/group_{group}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    model = TinyMLP(seed=10 * group, width=15)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
    seen = []
    with DiLoCo(manager, model, optimizer, sync_every=2, num_replicas=2, digest_every=1) as diloco:
        seen += [(r.outer_step, _digest_of_all(model)) for r in diloco.pop_finished_syncs()]
        for step in range(60):
            optimizer.zero_grad()
            mse(model, *batch(group, step)).backward()
            optimizer.step()
            for report in diloco.pop_finished_syncs():
                seen.append((report.outer_step, _digest_of_all(model)))
                if (report.outer_step, process.replica_id) == (3, 0):
                    process.signal.set()
            has_three = bool(seen) and len(seen) > 3 and manager.num_participants() == 3
            stop = torch.tensor([float(has_three and seen[-1][0] > 12)])
            dist.all_reduce(stop)
            if stop.item():
                break
            if manager.num_participants() < 3 and step > 8:
                time.sleep(0.5)
        diloco.final_sync()
        seen.append((-1, _digest_of_all(model)))
    manager.shutdown()
    return seen


def _digest_of_all(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        whole = parameter.full_tensor()  # type: ignore[operator]
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def test_sharded_groups_are_equal_also_one_that_healed_from_two_donors(tmp_path: Path):
    processes = run_groups(shard_and_train, 3 * RANKS, timeout_s=150.0, folder=str(tmp_path))
    held: dict[int, set[str]] = {}
    for seen in processes:
        for outer_step, digest in seen:
            held.setdefault(outer_step, set()).add(digest)
    assert all(len(digests) == 1 for digests in held.values()), held
    joiner = [outer_step for outer_step, _ in processes[-1]]
    assert joiner[0] > 3 and len(joiner) >= 3
    assert len(held) > 4
