"""Ranks that hold the same send a share each, and all end with the whole mean, to the bit.

Run: pytest tests/diloco/averaging/test_rank_shares.py. Three real processes of a group over gloo;
what the other group sends is added by hand.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from forked import context

from composer_replication.diloco.averaging.weighted_mean import WeightedMean
from composer_replication.diloco.shards import Shards

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
RANKS = 3
SIZES = [[5, 1, 70_000, 3], [2], [RANKS * 16], [200_000]]


def one_rank(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    compare(rank)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    del backend  # after all that has the group, or torch 2.7 may hang: see Gloo.abort


def compare(rank):
    draw = torch.Generator().manual_seed(0)
    for sizes in SIZES:
        ours = [torch.randn(size, generator=draw) for size in sizes]
        theirs = [torch.randn(size, generator=draw) for size in sizes]
        for weights in ((1.0, 1.0), (2.0, 5.0), (0.0, 1.0), (0.0, 0.0)):
            if len(ours) == 4:  # as channels_last makes them
                ours[2] = ours[2].reshape(-1, 7).t()
            shared = mean_of(ours, theirs, weights, dist.group.WORLD)
            alone = mean_of(ours, theirs, weights, None)
            assert shared.total == alone.total == sum(weights)
            assert shared.norm == pytest.approx(alone.norm, rel=1e-5)
            assert shared.num_bytes < alone.num_bytes / RANKS + 4 * 17
            pairs = zip(shared.unpack(), alone.unpack(), strict=True) if sum(weights) else ()
            for one, other in pairs:
                assert torch.equal(one, other), sizes
    # One rank alone finds a value that is not finite: none of the group contributes.
    ours = [torch.full((100,), float("nan") if rank == 1 else 1.0)]
    mean = mean_of(ours, [torch.ones(100)], (1.0, 3.0), dist.group.WORLD)
    assert not mean.is_finite and mean.total == 3.0
    assert next(mean.unpack()).tolist() == [1.0] * 100


def mean_of(ours, theirs, weights, ranks):
    """The mean with another group, whose same rank has sent its same share."""
    means = []
    for values, weight in zip((ours, theirs), weights, strict=True):
        share = Shards(values, ranks)
        share.bucket = 1000
        mean = WeightedMean(share, CPU)
        mean.pack(lambda value, into: into.copy_(value), (mean.share.own(values),), weight)
        means.append(mean)
    for one, other in zip(means[0].messages, means[1].messages, strict=True):
        one += other
    means[0].finish()
    return means[0]


def test_shares_make_up_the_whole(tmp_path):
    torch.multiprocessing.start_processes(
        one_rank, (str(tmp_path),), nprocs=RANKS, start_method=context.get_start_method()
    )


@dataclass
class OneOf:
    """Stands in for a process group of which nobody sends anything."""

    place: int
    num_ranks: int

    def rank(self):
        return self.place

    def size(self):
        return self.num_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [[5], [3, 40], [1, 100, 1], [0, 33, 0], [16, 16], [2] * 50])
def test_every_element_is_in_the_share_of_one_rank_in_order(sizes, ranks):
    whole = torch.arange(sum(sizes))
    tensors = whole.split(sizes)
    seen = []
    for rank in range(ranks):
        share = Shards(tensors, OneOf(rank, ranks))
        own = list(share.own(tensors))
        assert [part.numel() for part in own] == share.sizes
        assert torch.equal(torch.cat(own), whole[share.start : share.stop])
        assert share.stop - share.start == share.padded / ranks
        seen += [element for part in own for element in part.tolist()]
    assert seen == whole.tolist()
