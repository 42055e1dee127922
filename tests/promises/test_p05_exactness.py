"""P5: buckets, chunks and sizes never change a result, and mixed dtypes are right."""

import copy
from functools import partial

import pytest
import torch
from common import Constant, mean_of, plain_sgd
from harness.groups import learn, run
from torch import nn

from composer_replication.diloco import division
from composer_replication.diloco.division import Division
from composer_replication.diloco.flat_chunks import CHUNK
from composer_replication.diloco.fragments import split_model
from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.outer_optimizer import is_plain_sgd
from composer_replication.settings import WIRE_FORMATS
from composer_replication.simulation import SimulationError

CPU = torch.device("cpu")


@pytest.mark.parametrize("bucket", [1, 10, 2**18])
def test_the_size_of_a_bucket_never_changes_a_bit(bucket, monkeypatch):
    whole = learn(3, 10, sync_every=5)
    monkeypatch.setattr(division, "BUCKET", bucket)
    assert learn(3, 10, sync_every=5) == whole


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
    means = mean_of(Division(groups[0]), groups, (1.0, 1.0)).unpack().split(sizes)
    expected = [[2.0 * (k + 1)] for k in range(len(sizes))]
    assert [mean.unique().tolist() for mean in means] == expected


def test_mixed_dtypes_are_averaged_in_fp32():
    # In torchft a first bf16 parameter rounds the second one's -4.00390625 to -4.
    groups = [[torch.ones(3, dtype=torch.bfloat16), torch.tensor([-4.00390625])]] * 2
    mean = mean_of(Division(groups[0]), groups, (1.0, 1.0)).unpack()
    assert mean[-1] == -4.00390625


@pytest.mark.parametrize("shape", [(), (1,), (3, 0)])
def test_odd_shapes_take_part(shape):
    # torchft: a parameter without dimensions is a TypeError in the constructor.
    def replica(group):
        group.step(-1.0)
        return group.model.odd.shape, group.model.odd.unique().tolist()

    model = partial(Constant, 10.0, odd=shape, weight=(2,))
    found = run(1, replica, model=model, outer=plain_sgd(), sync_every=1)
    assert found == [(torch.Size(shape), [] if 0 in shape else [9.0])]


def test_outer_state_is_fp32_for_a_bf16_model():
    # torchft: backup, pseudo-gradient, sum and momentum are all bf16.
    def replica(group):
        group.step(-0.001)
        state = group.diloco.state_dict()["fragments"][0]
        momentum = state["optimizer"]["state"][0]["momentum_buffer"]
        return state["theta"]["weight"].dtype, momentum.dtype, group.model.weight.dtype

    model = partial(Constant, 0.02, dtype=torch.bfloat16)
    found = run(1, replica, model=model, sync_every=1, schedule=[])
    assert found == [(torch.float32, torch.float32, torch.bfloat16)]


# ---- 16-bit models ---------------------------------------------------------------------------


def test_what_one_of_eight_groups_has_learnt_stays_in_a_bfloat16_model():
    # In each round one group in turn moves by a step of bfloat16. What was rounded when theta was
    # written into the models of the others would take that back.
    def replica(group):
        for step in range(16):
            group.step(-(2.0**-8) if step % 8 == group.id else 0.0)
        return group.theta[0]

    model = partial(Constant, 1.0, dtype=torch.bfloat16)
    found = run(8, replica, model=model, outer=plain_sgd(), sync_every=1, same_samples=True)
    assert found == 8 * [1 - 16 * 2.0**-8 / 8]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delay", [0, 2])
def test_without_a_learning_rate_nothing_moves_in_a_16_bit_model(wire_format, dtype, delay):
    def replica(group):
        group.model.weight.data += 1.0 / 3  # theta is between two numbers of the dtype
        seen = []
        for step in range(40):
            group.step(0.3 * (group.id - 2.5) if step < 8 else 0.0)
            seen.append(group.theta[0])
        return seen

    settings = {"sync_every": 4, "wire_format": wire_format, "outer": plain_sgd(0.7)}
    settings |= {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5 if delay else 0.0}
    for seen in run(2, replica, model=partial(Constant, dtype=dtype), **settings):
        assert len(set(seen[:12])) > 1
        # What is mixed with an alpha cannot come nearer than the dtype's next number.
        step = 4.0 * torch.finfo(dtype).eps if delay else 0.0
        assert max(seen[-12:]) - min(seen[-12:]) <= step


def test_a_float64_parameter_is_refused_by_name():
    model = Constant(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"parameter weight is float64, .*: convert the model"):
        split_model(model)


def test_without_memory_for_the_global_state_the_error_has_the_bytes_and_the_ways_out(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    where = "composer_replication.diloco.construction.GlobalParameters"
    monkeypatch.setattr(where, no_memory)
    with pytest.raises(SimulationError, match=r"8 bytes for each of 1 elements .* backup_device='"):
        run(1, lambda group: None)


# ---- the outer step by chunks is torch's -------------------------------------------------------


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        for index, shape in enumerate([(3,), (CHUNK + 1,), (7, 5), (), (2, CHUNK)]):
            values = torch.randn(shape, generator=draw).to(dtype)
            self.register_parameter(f"p{index}", nn.Parameter(values))
        self.conv = nn.Conv2d(3, 8, 3, dtype=dtype).to(memory_format=torch.channels_last)


SGD = {
    "diloco": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "heavy ball": {"lr": 0.3, "momentum": 0.9},
    "plain": {"lr": 1.0},
}
OUTER = {
    **{name: partial(torch.optim.SGD, **settings) for name, settings in SGD.items()},
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "decay": partial(torch.optim.SGD, lr=0.7, weight_decay=0.1),
    "dampening": partial(torch.optim.SGD, lr=0.7, momentum=0.9, dampening=0.1),
}


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OUTER)
@pytest.mark.slow
def test_every_bit_of_an_outer_step_is_that_of_torch(name, dtype, alpha):
    model, built = Model(dtype), OUTER[name]
    assert not model.conv.weight.is_contiguous()
    plain = copy.deepcopy(model)
    globals_ = GlobalParameters(dict(model.named_parameters()), built, CPU)
    assert is_plain_sgd(globals_.optimizer) == (name in SGD)
    theta = [t.detach().clone().requires_grad_() for t in globals_.theta.values()]
    reference = built(theta)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        deltas = [[torch.randn(t.shape, generator=draw) for t in theta] for _ in range(2)]
        globals_.take_outer_step(mean_of(globals_.division, deltas, [1.0, 2.0]), alpha)
        for t, one, other in zip(theta, *deltas, strict=True):
            t.grad = (one + 2 * other) / 3
        reference.step()
        with torch.no_grad():
            for local, t in zip(plain.parameters(), theta, strict=True):
                local.copy_(t if alpha == 0.0 else t.lerp(local.float(), alpha))
        for mine, t in zip(globals_.theta.values(), theta, strict=True):
            assert torch.equal(mine, t)
        for mine, local in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, local) and mine.stride() == local.stride()
    state, expected = globals_.optimizer.state_dict(), reference.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    momenta = [each.get("momentum_buffer") for each in expected["state"].values()]
    for own, kept in zip(state["state"].values(), momenta, strict=True):
        assert kept is None or torch.equal(own["momentum_buffer"], kept)
    norms = [kept.norm() for kept in momenta if kept is not None]
    expected_norm = float(torch.stack(norms).norm()) if norms else 0.0
    _, norm = globals_.step_norms()
    assert norm == pytest.approx(expected_norm, rel=1e-5)


@pytest.mark.parametrize(("outer", "message"), [
    (lambda p: None, "outer_optimizer returned NoneType"),
    (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "over other parameters"),
])  # fmt: skip
def test_an_outer_optimizer_over_anything_else_is_refused(outer, message):
    with pytest.raises(ValueError, match=message):
        GlobalParameters(dict(Constant().named_parameters()), outer, CPU)
