"""Replica groups of two FSDP2 ranks each, on CPUs. Run: pytest tests/integration/test_fsdp.py

Real: processes, ``fully_shard`` over gloo, the lighthouse and heals. Each process is one rank; a
tensor that two ranks cannot share equally makes their shards unequal.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from common import Buffered, TinyMLP, batch, mse, muon_by_shape
from harness.processes import Process, run_groups
from integration.composer_ranks import digest_of
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.integration

RANKS = 2


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def shard_and_train(process: Process, folder: str) -> list[tuple[int, str]]:
    if process.replica_id // RANKS == 2:
        # It joins two others in training, and each of its ranks has another donor.
        process.signal.wait(60)
    group = process.of_rank(folder, RANKS)
    model = sharded(Buffered(seed=10 * group.replica_id, width=15))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    with group.training(model, inner=inner, outer=None, num_replicas=2) as run:
        diloco, manager = run.diloco, run.manager
        seen += [(r.outer_step, _digest_of_all(model)) for r in diloco.pop_finished_syncs()]
        for step in range(60):
            inner.zero_grad()
            mse(model, *batch(process.replica_id, step)).backward()  # each rank has its own
            inner.step()
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
    return seen


def _digest_of_all(model: torch.nn.Module) -> str:
    whole = [(name, p.full_tensor()) for name, p in model.named_parameters()]
    return digest_of([*whole, *model.named_buffers()])


def test_sharded_groups_are_equal_also_one_that_healed_from_two_donors(tmp_path: Path):
    processes = run_groups(shard_and_train, 3 * RANKS, folder=str(tmp_path))
    held: dict[int, set[str]] = {}
    for seen in processes:
        for outer_step, digest in seen:
            held.setdefault(outer_step, set()).add(digest)
    assert all(len(digests) == 1 for digests in held.values()), held
    joiner = [outer_step for outer_step, _ in processes[-1]]
    assert joiner[0] > 3 and len(joiner) >= 3
    assert len(held) > 4


def train_with_muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = muon_by_shape(model.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        mse(model, *batch(0, step)).backward()
        optimizer.step()
    return optimizer


def shard_and_train_with_muon(process: Process, folder: str) -> list[list[float]]:
    process.of_rank(folder, RANKS)
    model = sharded(TinyMLP(width=15))
    optimizer = train_with_muon(model)
    for p in model.parameters():
        for tensor in optimizer.state[p].values():
            assert tensor.ndim == 0 or tensor.placements == p.placements
    whole = [p.full_tensor() for p in model.parameters()]
    dist.destroy_process_group()
    return [p.flatten().tolist() for p in whole]


def test_muon_trains_whole_matrices_of_which_each_rank_has_a_shard(tmp_path: Path):
    model = TinyMLP(width=15)
    train_with_muon(model)
    one, other = run_groups(shard_and_train_with_muon, RANKS, folder=str(tmp_path))
    assert one == other
    for found, expected in zip(one, model.parameters(), strict=True):
        torch.testing.assert_close(
            torch.tensor(found), expected.detach().flatten(), rtol=0, atol=1e-6
        )
