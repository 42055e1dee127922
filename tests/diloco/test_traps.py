"""torchft's silent failures, each with the number it was measured with, and that we have none.

The numbers of stock torchft are in the comments; ``test_torchft_contract.py`` watches torchft.
"""

import pytest
import torch
from common import Constant, plain_sgd, take_step
from torch import nn

from composer_replication import DiLoCo, simulate
from composer_replication.simulation.simulation import SimulationError


def alone(replica):
    (result,) = simulate(replica, num_replicas=1)
    return result


def test_one_fragments_sync_leaves_the_other_fragment_alone():
    # torchft with one shared outer optimizer: the other fragment moves by 9.50 (0.7 * 1.9 * 7.14).
    def replica(sim):
        model = nn.Sequential(Constant(), Constant())
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        with DiLoCo(sim.manager, model, inner, sync_every=4, num_fragments=2) as diloco:
            for _ in range(2):
                take_step(inner, -7.14)
            assert len(diloco.pop_finished_syncs()) == 1
        return [p.item() for p in model.parameters()]

    assert alone(replica) == [10.0, 10.0]


def test_a_frozen_parameter_is_neither_sent_nor_backed_up_nor_decayed():
    # torchft: 4 allreduces and 9004 elements backed up instead of 4004; outer weight decay 0.1
    # moves the frozen weight by 0.067 in 2 rounds.
    def replica(sim):
        model = Constant(1.0, frozen=(5000,), trained=(4000,), scale=(4,))
        model.frozen.requires_grad_(False)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)

        def outer(parameters):
            return torch.optim.SGD(parameters, lr=0.7, weight_decay=0.1)

        with DiLoCo(sim.manager, model, inner, outer, 1) as diloco:
            for _ in range(2):
                take_step(inner, -0.1)
            held = sum(t.numel() for t in diloco.global_parameters().values())
            sent = diloco.pop_finished_syncs()[0].bytes_sent
        return held, sent, model.frozen.unique().tolist()

    assert alone(replica) == (4004, 4 * (4004 + 1), [1.0])


def test_weights_tied_over_two_fragments_move_once():
    # torchft: one step of -1, then none, and the weight goes 9.30, 9.51, 9.447, 9.466, ...
    def replica(sim):
        model = nn.Sequential(Constant(), Constant(3.0), Constant())
        model[2].weight = model[0].weight
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        with DiLoCo(
            sim.manager, [model[0], nn.Sequential(model[1], model[2])], inner, plain_sgd(0.7), 2
        ):
            take_step(inner, -1.0)
            for _ in range(4):
                seen.append(round(model[0].weight.item(), 5))
                take_step(inner, 0.0)
        return seen

    assert alone(replica) == [9.3, 9.3, 9.3, 9.3]


def test_a_parameter_outside_all_fragments_is_refused():
    # torchft: after 3 commits the uncovered layer differs between the groups (0.232 against 0.211).
    def replica(sim):
        model = nn.Sequential(Constant(), Constant())
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(ValueError, match="in the inner optimizer but in no fragment"):
            DiLoCo(sim.manager, [model[0]], inner, sync_every=2)

    alone(replica)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0)])
def test_odd_shapes_take_part(shape):
    # torchft: a parameter without dimensions is a TypeError in the constructor.
    def replica(sim):
        model = Constant(10.0, odd=shape, weight=(2,))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1):
            take_step(inner, -1.0)
        return model.odd.shape, model.odd.unique().tolist()

    assert alone(replica) == (torch.Size(shape), [] if 0 in shape else [9.0])


def test_a_gradient_monitor_still_sees_the_gradient_after_a_sync():
    # torchft's outer zero_grad leaves p.grad None after every sync.
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 1):
            take_step(inner, -1.0)
        return model.weight.grad.item()

    assert alone(replica) == 1.0


def test_outer_state_is_fp32_for_a_bf16_model():
    # torchft: backup, pseudo-gradient, sum and momentum are all bf16.
    def replica(sim):
        model = Constant(0.02, dtype=torch.bfloat16)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, sync_every=1) as diloco:
            take_step(inner, -0.001)
            state = diloco.state_dict()["fragments"][0]
        momentum = state["optimizer"]["state"][0]["momentum_buffer"]
        return state["theta"]["weight"].dtype, momentum.dtype, model.weight.dtype

    assert alone(replica) == (torch.float32, torch.float32, torch.bfloat16)


def test_two_diloco_on_one_manager_are_refused():
    # torchft: AssertionError ''.
    def replica(sim):
        for _ in range(2):
            model = Constant()
            DiLoCo(sim.manager, model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=1)

    with pytest.raises(Exception, match="diloco"):
        alone(replica)


def test_steps_that_are_not_training_do_not_count():
    def replica(sim):
        model = Constant()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2) as diloco:
            take_step(inner, -1.0)
            diloco.counts_steps = False
            take_step(inner, 0.0)
            diloco.counts_steps = True
            assert diloco.inner_steps == 1 and not diloco.pop_finished_syncs()
            take_step(inner, -1.0)
            return diloco.inner_steps, diloco.outer_step

    assert alone(replica) == (2, 1)


def test_an_async_quorum_is_refused():
    def replica(sim):
        sim.manager._use_async_quorum = True
        model = Constant()
        with pytest.raises(ValueError, match="use_async_quorum=False"):
            DiLoCo(sim.manager, model, torch.optim.SGD(model.parameters(), lr=1.0), sync_every=1)

    alone(replica)


def test_initial_parameters_that_are_not_finite_are_refused_before_any_group_takes_them():
    # Their mean would have no weight: each group would start from parameters of its own.
    def replica(sim):
        model = Constant(float("inf") if sim.replica_id == 0 else 1.0)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(sim.manager, model, inner, plain_sgd(), 2):
            return model.weight.item()

    with pytest.raises(SimulationError, match="replica 0 raised ValueError: the initial parameter"):
        simulate(replica, num_replicas=2)
