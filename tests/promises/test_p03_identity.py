"""P3: the special cases of the algorithm are the trainings that they are equal to."""

import pytest
import torch
from common import TinyMLP, batch, mse, plain_sgd
from harness.groups import adamw, learn, run, sgd


def largest_difference(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def trained(k, steps, **settings):
    """The models of k groups after training on samples of their own."""

    def replica(group):
        group.learn(0, steps)
        return group.model

    return run(k, replica, model=TinyMLP, outer=plain_sgd(), **settings)


def alone(steps, inner, k=1):
    """A model that is trained without replica groups, on the samples of k of them."""
    model = TinyMLP()
    optimizer = inner(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        parts = [batch(replica_id, step) for replica_id in range(k)]
        mse(model, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        optimizer.step()
    assert largest_difference(model, TinyMLP()) > 1e-2, "nothing was trained"
    return model


def test_one_group_with_outer_lr_1_and_no_momentum_is_the_inner_optimizer_alone():
    (model,) = trained(1, 50, inner=adamw, sync_every=5)
    assert largest_difference(model, alone(50, adamw)) < 1e-6


@pytest.mark.parametrize("k", [2, 3])
def test_a_sync_every_step_with_sgd_is_data_parallel_training(k):
    def inner(parameters):
        return sgd(parameters, 0.1)

    parallel = alone(20, inner, k)
    for model in trained(k, 20, inner=inner, sync_every=1):
        assert largest_difference(model, parallel) < 1e-6


def test_streaming_with_one_fragment_and_no_delay_is_bitwise_vanilla():
    vanilla = learn(2, 20, sync_every=5)
    streaming = {"num_fragments": 1, "fragment_sync_delay": 0, "fragment_update_alpha": 0.0}
    assert learn(2, 20, sync_every=5, **streaming) == vanilla
    assert len(set(vanilla[0].values())) == 4
