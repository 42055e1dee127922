"""Radial-directional averaging over simulated groups, against numbers computed by hand.

Run: pytest tests/diloco/averaging/test_radial.py.
"""

import math

import pytest
import torch

from composer_replication import simulate
from composer_replication.diloco.averaging.quantized_mean import make_mean
from composer_replication.diloco.averaging.radial import WIDTH, _square
from composer_replication.diloco.averaging.rank_shares import RankShare
from composer_replication.diloco.averaging.weighted_mean import CHUNK, MeanLayout
from composer_replication.diloco.averaging.wire_sizes import WIRE_FORMATS

CPU = torch.device("cpu")
ERROR = {"float32": 1e-6, "bfloat16": 0.01, "int8": 0.02, "fp4": 0.2}
"""Largest relative error of one merge."""


def build(sizes, merged, wire_format="float32", error_feedback=True, bucket_cap_mb=2**-9):
    layout = MeanLayout(RankShare(sizes), bucket_cap_mb, CPU)
    return make_mean(layout, wire_format, error_feedback, merged)


def merge(sim, mean, values, weight, plain=()):
    """One attempt at a sync: what the group takes over, or None if it did not commit."""
    sim.manager.start_quorum()
    if sim.manager.num_participants() == 1:
        plain = range(len(values))
    mean.pack(lambda value, into: into.copy_(value), (values,), weight, plain=plain)
    for work in mean.send(sim.manager):
        work.wait()
    taken = None
    if sim.manager.should_commit():
        taken = [each.clone() for each in mean.unpack()] if mean.finish() else []
    mean.clear()
    return taken


def merge_all(groups, weights, wire_format="float32", merged=None, **own):
    """What each group takes over from one sync."""
    sizes = [value.numel() for value in groups[0]]
    merged = range(len(sizes)) if merged is None else merged

    def replica(sim):
        rank = sim.replica_id
        return merge(sim, build(sizes, merged, wire_format, **own), groups[rank], weights[rank])

    return simulate(replica, num_replicas=len(groups))


def by_hand(groups, weights):
    """The formula, in float64."""
    total, result = sum(weights), []
    for tensors in zip(*groups, strict=True):
        tensors = [tensor.double() for tensor in tensors]
        norms = [float(tensor.norm()) for tensor in tensors]
        parts = zip(weights, tensors, norms, strict=True)
        direction = sum(w * tensor / norm for w, tensor, norm in parts if norm and w)
        length = sum(w * norm for w, norm in zip(weights, norms, strict=True) if w) / total
        result.append(length * direction / direction.norm())
    return result


def test_two_groups_and_three_tensors_by_hand():
    """First: (3, 4) and (-8, 6), of norms 5 and 10 and directions (.6, .8) and (-.8, .6).

    The mean norm is 7.5. The mean direction (-.1, .7) has the norm sqrt(.5), so the merge is
    7.5 / sqrt(.5) (-.1, .7) = (-1.0607, 7.4246). The mean would be (-2.5, 5).
    Second: (1, 0) and nothing. The mean norm is .5 and there is one direction: (.5, 0).
    Third: (2, 0) and (-2, 0). The directions cancel, and none is left: (0, 0).
    The last one is averaged plainly: (-2.5, 5).
    """
    groups = [
        [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])],
        [torch.tensor([-8.0, 6.0]), torch.tensor([0.0, 0.0]), torch.tensor([-2.0, 0.0])],
    ]
    for group in groups:
        group.append(group[0].clone())
    for taken in merge_all(groups, [1.0, 1.0], merged=(0, 1, 2)):
        first, second, third, plain = (each.tolist() for each in taken)
        assert first == pytest.approx([-1.06066, 7.42462], abs=1e-5)
        assert second == pytest.approx([0.5, 0.0])
        assert third == [0.0, 0.0]
        assert plain == [-2.5, 5.0]


def test_a_group_counts_by_its_contribution_in_the_norm_and_in_the_direction():
    """(3, 4) once and (-8, 6) three times: the mean norm is (5 + 30) / 4 = 8.75, the mean direction
    (.6 - 2.4, .8 + 1.8) / 4 = (-.45, .65), of the norm .79057."""
    groups = [[torch.tensor([3.0, 4.0])], [torch.tensor([-8.0, 6.0])]]
    for (taken,) in merge_all(groups, [1.0, 3.0]):
        assert taken.tolist() == pytest.approx([-4.98056, 7.19414], abs=1e-4)


SIZES = [3, 700, 1, 2049, 5000]


def values_of(group, step=0, sizes=SIZES):
    """The norms of the groups differ by an order of magnitude."""
    draw = torch.Generator().manual_seed(100 * group + step)
    return [torch.randn(size, generator=draw) * 10.0 ** (group % 2) for size in sizes]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("num_groups", [2, 3, 5])
def test_all_groups_get_the_same_bits_and_they_are_the_formula(num_groups, wire_format):
    sizes = [*SIZES, CHUNK + 40] if num_groups == 3 else SIZES
    groups = [values_of(group, sizes=sizes) for group in range(num_groups)]
    weights = [1.0, 2.0, 0.0, 5.0, 1.0][:num_groups]
    seen = merge_all(groups, weights, wire_format, bucket_cap_mb=0.5)
    for taken, *others, exact in zip(*seen, by_hand(groups, weights), strict=True):
        assert all(torch.equal(taken, other) for other in others)
        if taken.numel() > 3:  # a few elements take the scale of their neighbours
            assert float((taken - exact).norm() / exact.norm()) < ERROR[wire_format]
            assert float(taken.norm()) == pytest.approx(float(exact.norm()), rel=1e-4)


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("weight", [1.0, 3.0, 7.0])
def test_of_one_group_it_is_the_mean_to_the_bit(weight, wire_format):
    seen = [merge_all([values_of(0)], [weight], wire_format, m)[0] for m in (range(5), ())]
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("weights", [(3.0, 0.0), (0.0, 1.0, 0.0)])
def test_if_one_of_several_groups_contributes_it_is_its_own(weights, wire_format):
    """A quantized format weights what arrives, so it is the mean to the bit. In float32 the group
    has sent its direction, which is rounded."""
    groups = [values_of(group) for group in range(len(weights))]
    merged, mean = (merge_all(groups, weights, wire_format, m)[0] for m in (range(5), ()))
    for one, other in zip(merged, mean, strict=True):
        if wire_format == "float32":
            assert torch.allclose(one, other, rtol=1e-6, atol=0)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_a_sick_group_and_one_without_training_change_nothing(wire_format, bad):
    groups = [values_of(group) for group in range(4)]
    groups[1][1][5] = bad
    seen = merge_all(groups, [1.0, 1.0, 2.0, 0.0], wire_format)
    exact = by_hand([groups[0], groups[2]], [1.0, 2.0])
    for taken in seen:
        for one, other in zip(taken, exact, strict=True):
            if one.numel() > 1:
                assert float((one - other).norm() / other.norm()) < ERROR[wire_format]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_nothing_at_all_moves_nothing(wire_format):
    for taken in merge_all([[torch.zeros(5)]] * 3, [1.0, 1.0, 1.0], wire_format):
        assert taken[0].tolist() == [0.0] * 5
    for taken in merge_all([[torch.ones(5)]] * 3, [0.0, 0.0, 0.0], wire_format):
        assert taken == []


@pytest.mark.slow
@pytest.mark.parametrize("wire_format", ["int8", "fp4"])
@pytest.mark.parametrize("num_groups", [2, 3])
def test_the_residual_is_of_the_pseudo_gradient_whatever_the_norms(wire_format, num_groups):
    """The groups' norms differ, and each changes from sync to sync by its own factor. The merge of
    the same directions should come out the nearer, the more syncs it is averaged over."""
    sizes = [3000, 600]
    groups = [values_of(group, sizes=sizes) for group in range(num_groups)]
    factors = [[1.0, 3.0, 0.4][(step + 1) * 2 % 3] for step in range(24)]
    exact = by_hand(groups, [1.0] * num_groups)

    def replica(sim, error_feedback):
        mean = build(sizes, range(2), wire_format, error_feedback)
        sums = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        for factor in factors:  # the same for all groups, so that the sum of merges is known
            values = [value * factor for value in groups[sim.replica_id]]
            for total, taken in zip(sums, merge(sim, mean, values, 1.0), strict=True):
                total += taken
        return [total / sum(factors) for total in sums]

    errors = {}
    for feedback in (True, False):
        found, *_ = simulate(lambda sim, f=feedback: replica(sim, f), num_replicas=num_groups)
        errors[feedback] = [
            float((one - other).norm() / other.norm())
            for one, other in zip(found, exact, strict=True)
        ]
    assert all(a < 0.4 * b for a, b in zip(errors[True], errors[False], strict=True)), errors


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.slow
def test_what_one_group_wants_averaged_plainly_all_average_plainly(wire_format):
    groups = [values_of(group) for group in range(3)]

    def replica(sim, merged):
        mean = build(SIZES, merged, wire_format)
        wanted = [1, 3] if sim.replica_id == 1 else []
        taken = [merge(sim, mean, groups[sim.replica_id], 1.0, wanted) for _ in range(3)]
        # Once nobody wants it any more, those who followed have to find out too.
        return taken + [merge(sim, mean, groups[sim.replica_id], 1.0) for _ in range(2)]

    radial = simulate(lambda sim: replica(sim, range(5)), num_replicas=3)
    plain = simulate(lambda sim: replica(sim, ()), num_replicas=3)
    is_float32 = wire_format == "float32"
    for taken, mean in zip(radial, plain, strict=True):
        # In float32 who had sent a direction learns of it in an attempt that does not commit.
        assert [each is None for each in taken] == [is_float32, False, False, is_float32, False]
        if is_float32 or wire_format == "bfloat16":  # the others keep another rounding error
            for index in (1, 3):
                assert torch.allclose(taken[1][index], mean[1][index], rtol=1e-2, atol=1e-3)
        if is_float32:
            assert torch.equal(taken[1][1], mean[1][1]) and torch.equal(taken[2][3], mean[2][3])
        assert float(taken[1][0].norm()) > 1.01 * float(mean[1][0].norm())
        for after in filter(None, taken[3:]):
            for one, other in zip(after, by_hand(groups, [1.0] * 3), strict=True):
                if one.numel() > 3:
                    # What was kept back from a plain mean comes on top, with another weight.
                    assert float((one - other).norm() / other.norm()) < 6 * ERROR[wire_format]


@pytest.mark.parametrize("size", [0, 1, 5, 64, 1000, WIDTH, WIDTH + 1, 100_003])
def test_the_sum_of_squares_is_one_and_does_not_depend_on_the_order_of_a_library(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    exact = float(values.double().square().sum())
    assert float(_square(values)) == pytest.approx(exact, rel=1e-6)
    # An order of elementwise sums: padding and the number of threads change no bit.
    padded = torch.cat([values, torch.zeros(3 * WIDTH - size % WIDTH)])
    if size >= WIDTH:
        assert float(_square(padded)) == float(_square(values))
