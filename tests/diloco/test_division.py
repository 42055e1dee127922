"""Ranks that hold shards of a model agree on its norms, its digest and whether it is finite.

Run: pytest tests/diloco/test_division.py. Four real processes over gloo, in a mesh that shards in
one dimension and replicates in the other, and in one that only shards; each is compared with a
single rank that holds all.
"""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import mean_of, written
from harness.processes import run_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.division import Division, count_shards, held_tensor
from composer_replication.diloco.flat_chunks import Layout
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.settings import DiLoCoSettings

pytestmark = pytest.mark.integration

RANKS = 4
CPU = torch.device("cpu")


def one_rank(process, folder):
    process.of_rank(folder, RANKS)
    rank, world = dist.get_rank(), dist.group.WORLD
    leave_out(rank, world)
    compare(rank, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)], 2)
    compare(rank, init_device_mesh("cpu", (RANKS,)), [Shard(0)], RANKS)
    with pytest.raises(ValueError, match="divided into 4 shards, and ranks has 1 ranks: pass"):
        pair = [dist.new_group([each]) for each in range(RANKS)][rank]
        tensors = sharded(init_device_mesh("cpu", (RANKS,)), [Shard(0)]).values()
        Division(tensors, pair, are_held=True)
    parameters = sharded(init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    if rank == 2:  # the others are elsewhere, as at a cold start in which a peer has died
        local = parameters["third"].detach()
        layout = Layout(Division([local], world, are_held=True), [local])
        mean = WeightedMean(layout)
        mean.pack(written([local]), 1.0, asks_ranks=False)
        assert mean.norm > 0 and mean.contribution == 1.0


def leave_out(rank, world):
    """One rank alone finds a value that is not finite: none of the group contributes."""
    ours = [torch.full((100,), float("nan") if rank == 1 else 1.0)]
    mean = mean_of(division_of(ours, world), (ours, [torch.ones(100)]), (1.0, 3.0))
    assert not mean.is_finite and mean.divisor == 3.0
    mean.unpack()
    mean.division.gather(mean.flat)
    assert mean.flat[:100].tolist() == [1.0] * 100


def division_of(tensors, ranks):
    division = Division(tensors, ranks)
    division.bucket = 1000
    return division


def whole():
    draw = torch.Generator().manual_seed(0)
    shapes = {"first": (7, 3), "second": (1,), "third": (8, 5)}  # not divisible by the ranks
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def sharded(mesh, placements):
    """``third`` is no DTensor: every rank holds all of it."""
    tensors = whole()
    divided = {n: distribute_tensor(t, mesh, placements) for n, t in tensors.items()}
    return {n: nn.Parameter(t) for n, t in (divided | {"third": tensors["third"]}).items()}


def compare(rank, mesh, placements, num_shards):
    parameters = sharded(mesh, placements)
    assert [count_shards(t) for t in parameters.values()] == [num_shards, num_shards, 1]
    alone = step({name: nn.Parameter(t) for name, t in whole().items()}, None)
    shared = step(parameters, dist.group.WORLD)
    norms = [(mean.norm, *theta.step_norms()) for mean, theta in (alone, shared)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    digest = GlobalState([shared[1]], {}, DiLoCoSettings()).digest()
    assert one_of_all([norms[1], digest])
    # A value that is not finite, in the shard of one rank, or of two if they hold the same one.
    with torch.no_grad():
        if parameters["first"].to_local().numel() and mesh.get_local_rank(mesh.ndim - 1) == 1:
            parameters["first"].to_local()[0] = float("inf")
    sick, theta = step(parameters, dist.group.WORLD)
    assert sick.contribution == 0.0 and math.isinf(sick.norm)
    assert all(not message.any() for message in sick.messages)
    with torch.no_grad():
        if rank == 1:  # which a digest of rank 0's shard alone would not tell
            theta.theta["first"][0] += 1.0
    changed = GlobalState([theta], {}, DiLoCoSettings()).digest()
    assert one_of_all(changed) and changed != digest


def step(parameters, ranks):
    """A mean of their values, and the global parameters after an outer step along it."""
    outer = nesterov_sgd(1.0, 0.9)
    division_of = partial(Division, ranks=ranks, are_held=ranks is not None)
    owned = GlobalParameters(parameters, outer, CPU, division_of)
    local = [held_tensor(t).reshape(-1) for t in parameters.values()]
    mean = mean_of(owned.division, [local])
    if mean.is_finite:
        owned.take_outer_step(mean, alpha=1.0)
    return mean, owned


def one_of_all(value):
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, value)
    return all(other == gathered[0] for other in gathered)


def test_norms_digest_and_finiteness_are_of_all_ranks_and_shares_make_up_the_whole(tmp_path):
    run_groups(one_rank, RANKS, folder=str(tmp_path))
