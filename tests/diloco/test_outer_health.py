"""Metrics of the outer loop, from norms alone, are those of all pseudo-gradients.

``test_shared_globals.py`` has groups of several ranks.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from common import Constant
from harness.groups import run

from composer_replication.group.reports import numbers_of

DRAWN = {"a": (1000,), "b": (7,)}


def train_by(pseudo_gradients, *, shapes=DRAWN, samples=(1, 1, 1), value=10.0, **settings):
    """The reports of all groups: in round r group i moves so that [r][i] is its pseudo-gradient."""

    def replica(group):
        parameters = [*group.model.parameters()]
        for deltas in pseudo_gradients:
            for p, delta in zip(parameters, deltas[group.id], strict=True):
                p.grad = torch.as_tensor(delta)
            group.diloco.count_samples(samples[group.id])
            group.inner.step()
        return group.diloco.pop_finished_syncs()

    settings = {"model": partial(Constant, value, **shapes), "schedule": []} | settings
    return run(len(pseudo_gradients[0]), replica, sync_every=1, **settings)


def measured(report):
    return [report.group_cosine, report.outer_momentum_norm]


def drawn(groups, rounds, size=1000, seed=0):
    """Pseudo-gradients of two tensors that have something in common.

    In the third round the second tensor is frozen.
    """
    draw = torch.Generator().manual_seed(seed)
    common = [torch.randn(size, generator=draw) for _ in range(rounds)]
    return [
        [
            (c + torch.randn(size, generator=draw), torch.randn(7, generator=draw) * (number != 2))
            for _ in range(groups)
        ]
        for number, c in enumerate(common)
    ]


def cosine_of(one, other):
    one, other = one.double(), other.double()
    return float(one @ other / (one.norm() * other.norm()))


def expected(pseudo_gradients, weights, decay):
    """Of each round, from all of the groups' pseudo-gradients."""
    momentum = torch.zeros(1007, dtype=torch.float64)
    for deltas in pseudo_gradients:
        flat = [torch.cat([t.double() for t in delta]) for delta in deltas]
        mean = sum(w * d for w, d in zip(weights, flat, strict=True)) / sum(weights)
        norms = [w / sum(weights) * float(d.norm()) for w, d in zip(weights, flat, strict=True)]
        pairs = list(itertools.combinations(range(len(flat)), 2))
        products = [norms[i] * norms[j] for i, j in pairs]
        cosines = [cosine_of(flat[i], flat[j]) for i, j in pairs]
        between = sum(p * c for p, c in zip(products, cosines, strict=True)) / sum(products)
        if decay:
            momentum[1000:] *= bool(mean[1000:].any())  # what is frozen forgets its momentum
            momentum = decay * momentum + mean
        yield between, float(momentum.norm())


@pytest.mark.parametrize(("settings", "tolerance"), [
    ({}, 1e-5),
    ({"weight_by": "samples"}, 1e-5),
    ({"outer_nesterov": False}, 1e-5),
    ({"outer_momentum": 0.0}, 1e-5),
    ({"outer": partial(torch.optim.Adam, lr=0.1)}, 1e-5),  # none that is called momentum
    ({"wire_format": "bfloat16"}, 1e-3),
    ({"wire_format": "int8"}, 5e-3),
    ({"wire_format": "fp4"}, 5e-2),  # rounding lengthens the mean
], ids=str)  # fmt: skip
@pytest.mark.parametrize("groups", [2, 3])
def test_norms_alone_give_the_cosine_of_all_pseudo_gradients(settings, tolerance, groups):
    pseudo_gradients = drawn(groups, rounds=4)
    samples = (1, 5, 3)
    weights = samples if "weight_by" in settings else (1, 1, 1)
    reports, *others = train_by(pseudo_gradients, samples=samples, **settings)
    decay = 0.0 if "outer" in settings else settings.get("outer_momentum", 0.5)
    truth = expected(pseudo_gradients, weights[:groups], decay)
    assert [*map(measured, reports)] == [near(values, tolerance) for values in truth]
    assert all([*map(measured, other)] == [*map(measured, reports)] for other in others)


def near(values, tolerance):
    return pytest.approx([*values], abs=tolerance, rel=tolerance)


def test_a_group_that_contributes_nothing_is_in_none_of_them():
    pseudo_gradients = drawn(3, rounds=3)
    for deltas in pseudo_gradients:
        deltas[1] = (torch.full((1000,), math.inf), deltas[1][1])
    reports, sick, _ = train_by(pseudo_gradients, max_sync_retries=9)
    healthy = [[deltas[0], deltas[2]] for deltas in pseudo_gradients]
    for report, other, values in zip(reports, sick, expected(healthy, (1, 1), 0.5), strict=True):
        assert other.contribution == 0.0
        assert measured(report) == measured(other) == near(values, 1e-5)


def test_momentum_that_a_row_of_the_schedule_has_dropped_is_not_there():
    def replica(group):
        group.step(*[-1.0] * 8)
        return [round(norm / 2**0.5, 4) for norm in group.of_reports("outer_momentum_norm")]

    # At outer step 5, which is one of fragment a, momentum 0 drops that of both fragments.
    rows = [{"outer_step": 5, "outer_momentum": 0.0}, {"outer_step": 6, "outer_momentum": 0.9}]
    model = partial(Constant, a=(2,), b=(2,))
    settings = {"model": model, "fragment_patterns": ["a", "b"], "sync_every": 2}
    (found,) = run(1, replica, outer_momentum=0.9, schedule=rows, **settings)
    assert found == [1.0, 2.0, 2.9, 3.8, 0.0, 2.0, 2.0, 3.8]


def test_a_cosine_that_is_not_known_is_left_out_of_the_metrics():
    ((report,),) = train_by(drawn(1, rounds=1))
    assert report.group_cosine is None
    assert "diloco/group_cosine" not in numbers_of(report)


def test_a_group_that_hardly_moves_divides_by_no_zero():
    deltas = [((3.0, 0.0), (4.0,)), ((1e-18, 0.0), (0.0,))]
    (report,), _ = train_by([deltas], shapes={"a": (2,), "b": (1,)}, value=0.0)
    assert -1.0 <= report.group_cosine <= 1.0
