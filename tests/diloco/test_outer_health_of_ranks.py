"""Metrics of the outer loop in groups of several ranks are those of groups of one.

Run: pytest tests/diloco/test_outer_health_of_ranks.py. Two real processes over gloo; the two groups
are simulated, as threads in each process that have a process group of their own.
"""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import TinyMLP
from integration.replicas import run_groups
from promises.groups import Group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from composer_replication.diloco import shards
from composer_replication.simulation.simulation import simulate

pytestmark = pytest.mark.integration

RANKS = GROUPS = 2
COSINES = ("momentum_cosine", "group_cosine", "mean_norm_ratio")
CASES = {
    "vanilla": {"sync_every": 4},
    "streaming": {
        "sync_every": 8,
        "num_fragments": 2,
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.5,
    },
    "int8": {"sync_every": 4, "wire_format": "int8"},  # its blocks lie otherwise in shares
    "another optimizer": {"sync_every": 4, "outer": torch.optim.Adam},
}


def train(settings, groups_of_ranks=None, meshes=None):
    """All numbers of all reports of one group, whose ranks all have the same batches."""

    def replica(sim):
        model = TinyMLP(width=15)  # its tensors are not divisible by the ranks
        ranks = None if groups_of_ranks is None else groups_of_ranks[sim.replica_id]
        if meshes is not None:
            for layer in (*model.layers[::2], model):
                fully_shard(layer, mesh=meshes[sim.replica_id])
        inner = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
        with Group(sim, model, inner=inner, ranks=ranks, **settings) as group:
            group.learn(0, 16)
            return group.of_reports(*COSINES)

    one, other = simulate(replica, num_replicas=GROUPS)
    assert one == other
    return one


def one_rank(process, folder):
    process.of_rank(folder, RANKS)
    groups = [dist.new_group(range(RANKS)) for _ in range(GROUPS)]
    # Torch cannot connect two of these at a time in one process, of which real groups have one.
    host = {f"replica_{i}": dist.new_group(range(RANKS)) for i in range(GROUPS)}
    shards.HostRanks.connected = lambda self: host[threading.current_thread().name]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    for name, settings in CASES.items():
        alone, tolerance = train(settings), 1e-2 if name == "int8" else 1e-5
        assert len(alone) == 4
        assert all(value is not None for value in alone[-1]) or "outer" in settings
        for ranks in (train(settings, groups), train(settings, groups, meshes)):
            for mine, theirs in zip(alone, ranks, strict=True):
                assert mine == pytest.approx(theirs, abs=tolerance), name


def test_ranks_have_the_numbers_of_one_process(tmp_path):
    run_groups(one_rank, RANKS, folder=str(tmp_path))
