"""An average that replaces the local parameters becomes the global ones, in all groups.

``pytest tests/diloco/test_make_local_global.py``: simulated network, traces computed by hand.
"""

import pytest
import torch
from common import Constant, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.outer_optimizer import nesterov_sgd

MOVES = (1.0, -3.0)
SETTINGS = {
    "vanilla": {"sync_every": 3},
    "fragments": {"sync_every": 4, "fragment_patterns": ["a", "b"]},
    "streaming": {
        "sync_every": 4,
        "fragment_patterns": ["a", "b"],
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.5,
    },
}


def replace_by(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def train(sim, steps, replace_after, value=5.0, final=True, **settings):
    """Train with DiLoCo's default outer optimizer; the model is filled with a value on the way."""
    model = Constant(a=(2,), b=(3,))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    trace = []
    with DiLoCo(sim.manager, model, inner, nesterov_sgd(momentum=0.9), **settings) as diloco:
        for step in range(1, steps + 1):
            if step == steps:
                diloco.expect_last_step()
            take_step(inner, MOVES[sim.replica_id])
            if step == replace_after:
                replace_by(model, value)
                diloco.make_local_global()
                assert diloco.replaces_global
            theta = diloco.global_parameters()
            trace.append((model.a[0].item(), theta["a"][0].item(), diloco.replaces_global))
        if final:
            diloco.final_sync()
            assert not diloco.replaces_global
        theta = diloco.global_parameters()
        return model.a.tolist() + model.b.tolist(), diloco.global_digest(), trace


@pytest.mark.parametrize("steps", [6, 7, 8, 9])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("groups", [1, 2])
def test_after_the_last_step_it_is_what_the_model_ends_with(settings, steps, groups):
    runs = simulate(lambda sim: train(sim, steps, steps, **settings), num_replicas=groups)
    assert len({digest for _, digest, _ in runs}) == 1
    for values, _, _ in runs:
        assert values == pytest.approx([5.0] * 5, abs=1e-6)


@pytest.mark.parametrize("wire_format", ["bfloat16", "int8", "fp4"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_no_wire_format_rounds_it(settings, groups, wire_format):
    settings = settings | {"wire_format": wire_format}
    moves = (1.0, -3.0, 0.7)

    def replica(sim):
        model = Constant(a=(2,), b=(3,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, nesterov_sgd(), **settings) as diloco:
            for _ in range(6):
                take_step(inner, moves[sim.replica_id])
            replace_by(model, 0.1)
            diloco.make_local_global()
            diloco.final_sync()
            return torch.cat([*diloco.global_parameters().values()]).tolist()

    runs = simulate(replica, num_replicas=groups)
    assert all(values == runs[0] for values in runs)
    assert runs[0] == pytest.approx([0.1] * 5, abs=1e-6)


def test_in_mid_run_the_next_outer_step_is_the_plain_mean_and_momentum_begins_anew():
    runs = simulate(lambda sim: train(sim, 9, 4, final=False, sync_every=3), num_replicas=2)
    assert runs[0][1] == runs[1][1]
    for (_, _, trace), move in zip(runs, MOVES, strict=True):
        local, theta, replaces = (list(column) for column in zip(*trace, strict=True))
        assert local[3:5] == [5.0, 5.0 + move]
        assert replaces == [False] * 3 + [True] * 2 + [False] * 4
        # Two steps after the average, of -1 in the mean; then a first outer step of 3 of them.
        assert theta[5] == pytest.approx(3.0)
        assert theta[8] == pytest.approx(3.0 - 0.7 * 1.9 * 3)


def test_what_is_in_flight_leaves_the_average_alone():
    settings = {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
    runs = simulate(lambda sim: train(sim, 8, 3, final=False, **settings), num_replicas=2)
    assert runs[0][1] == runs[1][1]
    for (_, _, trace), move in zip(runs, MOVES, strict=True):
        local, theta, _ = (list(column) for column in zip(*trace, strict=True))
        assert theta[3] == pytest.approx(10 - 0.7 * 1.9 * 2)  # what was sent after two steps
        assert local[3:6] == [5.0 + move, 5.0 + 2 * move, 5.0 + 3 * move]
        assert theta[7] == pytest.approx(5.0 - 3)  # what was sent after six


def test_it_survives_a_resume():
    def replica(sim):
        model = Constant(a=(2,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, nesterov_sgd(momentum=0.9), 3) as diloco:
            for _ in range(4):
                take_step(inner, 1.0)
            replace_by(model, 5.0)
            diloco.make_local_global()
            return diloco.state_dict()

    def resumed(sim):
        model = Constant(5.0, a=(2,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(sim.manager, model, inner, nesterov_sgd(momentum=0.9), 3)
        diloco.load_state_dict(state)
        assert diloco.replaces_global
        with diloco:
            for _ in range(2):
                take_step(inner, 1.0)
            return model.a.tolist(), diloco.replaces_global

    (state,) = simulate(replica, num_replicas=1)
    assert simulate(resumed, num_replicas=1) == [([7.0, 7.0], False)]
