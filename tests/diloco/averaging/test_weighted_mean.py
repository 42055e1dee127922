"""Flat buckets: every element exactly once, whatever the sizes."""

import math

import pytest
import torch

from composer_replication.diloco.averaging.weighted_mean import CHUNK, WeightedMean
from composer_replication.diloco.shards import Shards

CPU = torch.device("cpu")


def average(groups, weights, bucket=2**18):
    """The mean that each group computes, with the sum that a network would give."""
    shares = [Shards(group) for group in groups]
    for share in shares:
        share.bucket = bucket
    means = [WeightedMean(share, CPU) for share in shares]
    for mean, group, weight in zip(means, groups, weights, strict=True):
        flat = [t.reshape(-1) for t in group]
        mean.pack(lambda value, into: into.copy_(value), (flat,), weight)
    for messages in zip(*(mean.messages for mean in means), strict=True):
        total = sum(m.clone() for m in messages)
        for message in messages:
            message.copy_(total)
    results = [[torch.full(t.shape, 7.0) for t in group] for group in groups]
    totals = [mean.finish() for mean in means]
    for mean, result in zip(means, results, strict=True):
        for into, value in zip(result, mean.unpack(), strict=True) if mean.total else ():
            into.copy_(value.view(into.shape))
    return results, totals


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
    results, _ = average(groups, [1.0, 1.0])
    for result in results:
        for k, tensor in enumerate(result):
            assert tensor.unique().tolist() == [2.0 * (k + 1)]


def test_mixed_dtypes_are_averaged_in_fp32():
    # In torchft a first bf16 parameter rounds the second one's -4.00390625 to -4.
    groups = [[torch.ones(3, dtype=torch.bfloat16), torch.tensor([-4.00390625])]] * 2
    results, _ = average(groups, [1.0, 1.0])
    assert results[0][1].item() == -4.00390625


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_whose_values_are_not_finite_has_no_weight(bad):
    groups = [[torch.tensor([1.0, 2.0])], [torch.tensor([5.0, bad])]]
    results, totals = average(groups, [1.0, 1.0], bucket=1)
    assert totals == [1.0, 1.0]
    assert results[0][0].tolist() == results[1][0].tolist() == [1.0, 2.0]


def test_without_any_weight_nothing_is_written():
    results, totals = average([[torch.tensor([1.0])]] * 2, [0.0, 0.0])
    assert totals == [0.0, 0.0]
    assert results[0][0].item() == 7.0


def test_norm_and_bytes_are_those_of_what_is_sent():
    values = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    share = Shards(values)
    share.bucket = 2
    mean = WeightedMean(share, CPU)
    mean.pack(lambda value, into: into.copy_(value), (values,), 2.0)
    assert mean.norm == 5.0
    assert [message.tolist() for message in mean.messages] == [[6.0, 0.0], [8.0], [2.0]]
    assert mean.num_bytes == 4 * (3 + 1)
