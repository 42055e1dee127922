"""A state that is staged before the heal. Run: pytest tests/diloco/test_global_state.py

No network: two groups' global states, of which one goes to the other.
"""

import pytest
import torch
from common import mean_of, plain_sgd
from torch import nn

from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.settings import FIXED, DiLoCoSettings, SettingsMismatch

CPU = torch.device("cpu")
OUTER = {
    "momentum": nesterov_sgd(0.7, 0.9),
    "no momentum": plain_sgd(),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


class Group:
    """A global state of two fragments, the second one with a buffer."""

    def __init__(self, seed, outer, model="a model"):
        draw = torch.Generator().manual_seed(seed)
        shapes = ({"first": (7, 3), "second": (5,)}, {"third": (4, 4)})
        self.local = [
            {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in each.items()}
            for each in shapes
        ]
        buffers = {"mean": torch.randn(6, generator=draw)}
        self.fragments = [
            GlobalParameters(self.local[0], outer, CPU),
            GlobalParameters(self.local[1], outer, CPU, buffers),
        ]
        fingerprint = dict.fromkeys(FIXED, 1) | {"model": model, "outer_optimizer": "SGD()"}
        self.state = GlobalState(self.fragments, fingerprint, DiLoCoSettings())

    def take_outer_step(self):
        with self.state.outer_step_of([]):
            for fragment in self.fragments:
                values = [torch.sin(theta.detach()) for theta in fragment.theta.values()]
                fragment.take_outer_step(mean_of(fragment.share, [values]))

    def numbers(self):
        return [fragment.flat.clone() for fragment in self.fragments]


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.fixture(params=OUTER)
def outer(request):
    return OUTER[request.param]


@pytest.fixture
def donor(outer):
    donor = Group(0, outer)
    for _ in range(3):
        donor.take_outer_step()
    return donor


def test_a_heal_from_a_staged_state_is_that_from_any_other(donor, outer):
    plain, staged = Group(1, outer), Group(1, outer)
    sent = donor.state.state_dict(copies=False)
    before = staged.numbers()
    staged.state.stage(sent)
    assert equal(staged.numbers(), before) and staged.state.outer_step == 0
    plain.state.take_over(sent, "a test")
    staged.state.take_over(sent, "a test")
    for _ in range(3):
        assert equal(staged.numbers(), plain.numbers()) and equal(plain.numbers(), donor.numbers())
        assert staged.state.digest() == donor.state.digest()
        for group in (donor, plain, staged):  # each in memory of its own
            group.take_outer_step()
    assert staged.state.outer_step == donor.state.outer_step == 6


def test_the_heal_copies_and_hashes_nothing(donor, outer, monkeypatch):
    joiner, other = Group(1, outer), Group(1, outer)
    sent = donor.state.state_dict()
    other.state.take_over(sent, "a test")
    joiner.state.stage(sent)
    for saved in sent["fragments"]:
        for tensor in saved["theta"].values():
            tensor.fill_(float("nan"))  # whatever is copied now is wrong
    monkeypatch.setattr("composer_replication.diloco.global_state.digest_of", None)
    joiner.state.take_over(sent, "a test")
    digests = joiner.state.fragment_digests()
    monkeypatch.undo()
    assert equal(joiner.numbers(), donor.numbers())
    assert digests == other.state.fragment_digests()
    joiner.take_outer_step()
    other.take_outer_step()
    assert joiner.state.fragment_digests() == other.state.fragment_digests() != digests


def test_a_later_state_is_taken_over_as_if_nothing_had_been_staged(donor, outer):
    joiner = Group(1, outer)
    joiner.state.stage(donor.state.state_dict())
    donor.take_outer_step()
    joiner.state.take_over(donor.state.state_dict(), "a test")
    donor.take_outer_step()
    joiner.take_outer_step()
    assert equal(joiner.numbers(), donor.numbers())
    assert joiner.state.fragment_digests() == donor.state.fragment_digests()


def test_a_heal_after_that_is_from_what_it_is_given(donor, outer):
    joiner = Group(1, outer)
    first = donor.state.state_dict()
    joiner.state.stage(first)
    joiner.state.take_over(first, "a test")
    joiner.take_outer_step()
    joiner.state.take_over(first, "a test")
    assert equal(joiner.numbers(), donor.numbers())


def test_of_another_model_nothing_is_staged_and_the_heal_says_so(donor, outer):
    joiner = Group(1, outer, model="another model")
    sent = donor.state.state_dict()
    for saved in sent["fragments"]:
        saved["theta"].clear()
    joiner.state.stage(sent)
    with pytest.raises(SettingsMismatch, match="model: 'another model' here, 'a model' there"):
        joiner.state.take_over(sent, "a test")


def test_a_state_without_a_tensor_is_left_to_the_heal_too(donor, outer):
    joiner = Group(1, outer)
    before = joiner.numbers()
    sent = donor.state.state_dict()
    del sent["fragments"][1]["theta"]["third"]
    joiner.state.stage(sent)
    assert equal(joiner.numbers(), before)
    with pytest.raises(ValueError, match="global parameter third of a .* received state is miss"):
        joiner.state.take_over(sent, "a test")
