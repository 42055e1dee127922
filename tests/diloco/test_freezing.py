"""What all groups have frozen takes the outer step that is due, and then does not move by a bit.

``pytest tests/diloco/test_freezing.py``: simulated network, traces computed by hand.
"""

import pytest
import torch
from common import Constant, load, plain_sgd, save, take_step

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.simulation.simulation import SimulationError

MOVES = (1.0, -3.0)
"""What an inner step of each group adds to every parameter."""


def train(sim, steps, freeze_after, *, frozen=("a",), outer=None, dtype=torch.float32, **settings):
    """Two parameters, of which ``frozen`` are frozen after some steps; the local and global values
    after every step, and the digest at the end."""
    model = Constant(10.0, dtype, a=(2,), b=(3,))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    trace = []
    with DiLoCo(
        sim.manager, model, inner, outer or nesterov_sgd(momentum=0.9), **settings
    ) as diloco:
        for step in range(steps):
            if step == freeze_after:
                for name in frozen:
                    model.get_parameter(name).requires_grad_(False)
                    model.get_parameter(name).grad = None
            take_step(inner, MOVES[sim.replica_id])
            theta = diloco.global_parameters()
            trace.append([t[0].item() for t in (model.a, theta["a"], model.b, theta["b"])])
        return trace, diloco.global_digest(), diloco.state_dict()


def columns(trace):
    return [list(column) for column in zip(*trace, strict=True)]


@pytest.mark.parametrize(
    "outer", [nesterov_sgd(momentum=0.9), plain_sgd(), lambda p: torch.optim.Adam(p, 0.1)]
)
def test_frozen_at_the_end_of_a_round_it_never_moves_again(outer):
    runs = simulate(lambda sim: train(sim, 9, 4, outer=outer, sync_every=2), num_replicas=2)
    assert runs[0][1] == runs[1][1]
    for trace, _, _ in runs:
        local_a, theta_a, local_b, theta_b = columns(trace)
        assert set(local_a[3:]) == set(theta_a[3:]) == {local_a[3]}
        assert len(set(theta_b[3:])) == 3, "what is not frozen goes on"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire_format", ["float32", "int8", "fp4"])
@pytest.mark.parametrize("settings", [
    {"sync_every": 2},
    {"sync_every": 4, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5},
], ids=["vanilla", "streaming"])  # fmt: skip
def test_frozen_in_mid_round_it_takes_one_outer_step_more(settings, wire_format, dtype):
    def replica(sim):
        return train(sim, 20, 3, dtype=dtype, wire_format=wire_format, **settings)

    runs = simulate(replica, num_replicas=2)
    assert runs[0][1] == runs[1][1]
    for trace, _, _ in runs:
        local_a, theta_a, _, theta_b = columns(trace)
        # It is frozen after 3 steps: the sync of step 4 has what was trained until then.
        assert set(theta_a[4:]) == {theta_a[4]} and theta_a[4] != theta_a[0]
        assert set(local_a[4:]) == {torch.tensor(theta_a[4]).to(dtype).item()}
        assert len(set(theta_b[4:])) > 3, "what is not frozen goes on"


def test_by_hand_the_last_step_is_nesterovs_and_the_momentum_is_forgotten():
    runs = simulate(lambda sim: train(sim, 8, 3, sync_every=2), num_replicas=2)
    # The mean step of the groups is -1: deltas of 2 and, with one step, of 1. Momentum 2, then 2.8.
    first = 10 - 0.7 * (2 + 0.9 * 2)
    second = first - 0.7 * (1 + 0.9 * 2.8)
    for trace, _, state in runs:
        assert columns(trace)[1][3:] == pytest.approx([second] * 5)
        assert list(state["fragments"][0]["optimizer"]["state"]) == [1], "b alone has momentum"


def test_what_one_group_alone_has_frozen_goes_on_moving():
    def replica(sim):
        frozen = ("a",) if sim.replica_id == 0 else ()
        return train(sim, 8, 2, frozen=frozen, outer=plain_sgd(), sync_every=2)

    runs = simulate(replica, num_replicas=2)
    assert runs[0][1] == runs[1][1]
    # Each round of two steps: group 0 adds 0 to a and group 1 adds -6, so -3 on average.
    assert columns(runs[0][0])[1][-1] == pytest.approx(10 - 2 - 3 * 3)


def test_a_parameter_that_is_thawed_again_moves_again_without_its_old_momentum():
    def replica(sim):
        model = Constant(a=(2,), b=(3,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        with DiLoCo(sim.manager, model, inner, nesterov_sgd(momentum=0.9), 2) as diloco:
            for step in range(8):
                model.a.requires_grad_(not 2 <= step < 6)
                if not model.a.requires_grad:
                    model.a.grad = None
                take_step(inner, 1.0)
                seen.append(diloco.global_parameters()["a"][0].item())
        return seen

    (seen,) = simulate(replica, num_replicas=1)
    first = 10 + 0.7 * 1.9 * 2
    assert seen[1:7] == pytest.approx([first] * 6)
    assert seen[7] == pytest.approx(first + 0.7 * 1.9 * 2)


def test_training_what_was_frozen_when_it_began_is_an_error_that_names_it():
    def replica(sim):
        model = Constant(a=(2,), b=(3,))
        model.b.requires_grad_(False)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2):
            take_step(inner, 1.0)
            model.b.requires_grad_(True)
            take_step(inner, 1.0)

    with pytest.raises(SimulationError, match="frozen when training began, and trained now: b"):
        simulate(replica, num_replicas=1)


def test_frozen_in_flight_stopped_there_and_resumed_is_bitwise_uninterrupted():
    # Sent after inner step 6, frozen before step 7, stopped after it, applied after step 8.
    def replica(sim, steps, saved=None):
        model = Constant(a=(2, 3), b=(3,))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"sync_every": 4, "fragment_sync_delay": 2, "wire_format": "int8"}
        diloco = DiLoCo(sim.manager, model, inner, num_replicas=2, **settings)
        if saved is not None:
            load(saved[sim.replica_id], diloco, model)
        with diloco:
            for step in steps:
                model.a.requires_grad_(step < 6)
                for p in model.parameters():
                    numbers = torch.arange(p.numel()).view(p.shape) + step + sim.replica_id
                    p.grad = torch.sin(numbers.float()) if p.requires_grad else None
                inner.step()
            return save(diloco, model) if steps[-1] == 6 else diloco.global_digest()

    whole = simulate(lambda sim: replica(sim, range(12)), num_replicas=2)
    saved = simulate(lambda sim: replica(sim, range(7)), num_replicas=2)
    assert simulate(lambda sim: replica(sim, range(7, 12), saved), num_replicas=2) == whole


def test_what_is_also_synced_is_frozen_and_belongs_to_the_global_state():
    def replica(sim):
        model = Constant(a=(2,), b=(3,))
        model.b.requires_grad_(False)
        inner = torch.optim.SGD([model.a], lr=1.0)
        with DiLoCo(sim.manager, model, inner, sync_every=2, also_synced=["b"]) as diloco:
            for _ in range(4):
                take_step(inner, 1.0)
            return diloco.global_parameters()["b"].tolist(), model.a[0].item()

    ((b, a),) = simulate(replica, num_replicas=1)
    assert b == [10.0] * 3 and a > 10
