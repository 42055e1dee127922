"""Flat buckets: every element exactly once, whatever the sizes."""

import math

import pytest
import torch
from common import mean_of

from composer_replication.diloco.averaging.weighted_mean import CHUNK, WeightedMean
from composer_replication.diloco.shards import Shards

CPU = torch.device("cpu")


def average(groups, weights=(1.0, 1.0), bucket=2**18):
    """The sum of the weights, and the mean of each tensor if there is one."""
    share = Shards(groups[0])
    share.bucket = bucket
    mean = mean_of(share, groups, weights)
    return mean.total, [*mean.unpack()] if mean.total else None


# The trap of torchft's use_bucketization (research b): sizes in elements, caps of 1 MiB; there the
# parameters in the last column keep their own, un-averaged delta while every commit succeeds.
TRAPS = {
    "two exact buckets": [262144, 262144],
    "uneven": [200_000, 200_000, 100_000],
    "larger than a bucket": [300_000, 10],
    "larger in the middle": [10, 300_000, 10],
    "around a chunk": [CHUNK - 1, CHUNK, CHUNK + 1],
}


@pytest.mark.parametrize("sizes", TRAPS.values(), ids=TRAPS.keys())
def test_where_torchft_drops_gradients_the_mean_is_right(sizes):
    # Replica 0 sends k + 1 for parameter k, replica 1 sends 3 (k + 1): the mean is 2 (k + 1).
    groups = [
        [torch.full((n,), factor * (k + 1.0)) for k, n in enumerate(sizes)] for factor in (1, 3)
    ]
    _, means = average(groups)
    assert [mean.unique().tolist() for mean in means] == [
        [2.0 * (k + 1)] for k in range(len(sizes))
    ]


def test_mixed_dtypes_are_averaged_in_fp32():
    # In torchft a first bf16 parameter rounds the second one's -4.00390625 to -4.
    groups = [[torch.ones(3, dtype=torch.bfloat16), torch.tensor([-4.00390625])]] * 2
    _, means = average(groups)
    assert means[1].item() == -4.00390625


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_whose_values_are_not_finite_has_no_weight(bad):
    total, means = average([[torch.tensor([1.0, 2.0])], [torch.tensor([5.0, bad])]], bucket=1)
    assert total == 1.0 and means[0].tolist() == [1.0, 2.0]


def test_without_any_weight_there_is_no_mean():
    assert average([[torch.tensor([1.0])]] * 2, [0.0, 0.0]) == (0.0, None)


def test_norm_and_bytes_are_those_of_what_is_sent():
    values = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    share = Shards(values)
    share.bucket = 2
    mean = WeightedMean(share, CPU)
    mean.pack(lambda value, into: into.copy_(value), (values,), 2.0)
    assert mean.norm == 5.0
    assert [message.tolist() for message in mean.messages] == [[6.0, 0.0], [8.0], [2.0]]
    assert mean.num_bytes == 4 * (3 + 1)
