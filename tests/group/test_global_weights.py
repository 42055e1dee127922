"""Global weights in the place of local ones. Run: pytest tests/group/test_global_weights.py"""

import copy

import pytest
import torch
from common import are_equal, parameters_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

from composer_replication.group.global_weights import GlobalWeights


class Model(nn.Module):
    """Nested, with a tied and a frozen parameter and a buffer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(dtype)
        self.embedding = nn.Embedding(2, 2, dtype=dtype)
        self.head = nn.Linear(2, 2, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def theta_of(model):
    return {
        name: torch.full_like(p, float(place), dtype=torch.float32)
        for place, (name, p) in enumerate(model.named_parameters())
        if p.requires_grad
    }


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def theta(model):
    return theta_of(model)


def test_the_state_dict_has_the_global_parameters_and_training_goes_on_with_the_local(model, theta):
    local = parameters_of(model)
    GlobalWeights(model, theta)
    saved = model.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in theta.items())
    assert torch.equal(saved["head.weight"], theta["embedding.weight"])  # tied
    assert torch.equal(saved["frozen"], torch.ones(2))
    assert torch.equal(saved["inner.1.running_var"], torch.ones(2))
    assert are_equal(parameters_of(model), local)


def test_so_has_that_of_any_part_of_the_model_and_of_a_wrapper(model, theta):
    GlobalWeights(model, theta)
    assert torch.equal(model.inner.state_dict()["0.weight"], theta["inner.0.weight"])
    wrapped = nn.ModuleDict({"module": model}).state_dict()
    assert torch.equal(wrapped["module.inner.0.bias"], theta["inner.0.bias"])


def test_so_has_that_of_a_model_with_activation_checkpointing(model, theta):
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, nn.Linear))
    weights = GlobalWeights(model, theta)
    saved = model.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in theta.items())
    assert weights.local().keys() == theta.keys()


def test_dtypes_are_the_model_s():
    model = Model(torch.bfloat16)
    theta = {name: t + 1 / 3 for name, t in theta_of(model).items()}
    GlobalWeights(model, theta)
    saved = model.state_dict()["inner.0.weight"]
    assert torch.equal(saved, theta["inner.0.weight"].bfloat16())


def test_fp32_weights_are_not_copied(model, theta):
    # torch.save then writes them once, should anything else of the checkpoint hold them too.
    GlobalWeights(model, theta)
    assert model.state_dict()["inner.0.weight"].data_ptr() == theta["inner.0.weight"].data_ptr()


def test_a_deep_copy_has_weights_of_its_own(model, theta):
    GlobalWeights(model, theta)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.inner[0].weight.fill_(9.0)
    assert other.state_dict()["inner.0.weight"].eq(9.0).all()


def test_who_asks_for_the_model_s_own_tensors_gets_them(model, theta):
    GlobalWeights(model, theta)
    assert model.state_dict(keep_vars=True)["inner.0.weight"] is model.inner[0].weight


def test_shown_and_hidden_again_the_local_ones_are_back_to_the_bit(model, theta):
    local = parameters_of(model)
    weights = GlobalWeights(model, theta)
    for _ in range(2):  # twice, as Composer's events may come
        weights.show()
    assert all(torch.equal(dict(model.named_parameters())[name], t) for name, t in theta.items())
    assert all(torch.equal(weights.local()[name], local[name]) for name in theta)
    for _ in range(2):
        weights.hide()
    assert are_equal(parameters_of(model), local)


def test_what_cannot_be_shown_to_the_end_leaves_the_local_ones(model, theta):
    local = parameters_of(model)
    weights = GlobalWeights(model, theta)
    del theta["embedding.weight"]  # instead of an out-of-memory error
    with pytest.raises(KeyError):
        weights.show()
    assert are_equal(parameters_of(model), local)


def test_removed_it_leaves_the_model_as_it_would_be_without(model, theta):
    local = parameters_of(model)
    weights = GlobalWeights(model, theta)
    weights.show()
    weights.remove()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in local.items())


def test_a_buffer_that_is_averaged_is_global_too(model, theta):
    theta["inner.1.running_mean"] = torch.full((2,), 5.0)
    weights = GlobalWeights(model, theta)
    assert model.state_dict()["inner.1.running_mean"].eq(5.0).all()
    weights.show()
    assert model.inner[1].running_mean.eq(5.0).all()
