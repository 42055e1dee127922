"""A state that is staged before the heal. No network: two groups' states, one goes to the other."""

import copy
from functools import partial

import pytest
import torch
from common import mean_of, plain_sgd
from torch import nn

from composer_replication.diloco.global_parameters import GlobalParameters
from composer_replication.diloco.global_state import GlobalState
from composer_replication.diloco.outer_optimizer import nesterov_sgd
from composer_replication.diloco.torchft_api import STATE_NAME
from composer_replication.replica.heal.state_bytes import dump, load
from composer_replication.settings import FIXED, DiLoCoSettings, SettingsMismatch

CPU = torch.device("cpu")
OUTER = {
    "momentum": nesterov_sgd(0.7, 0.9),
    "no momentum": plain_sgd(),
    "Adam": partial(torch.optim.Adam, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1, momentum=0.9),
}


class State(GlobalState):
    """A global state of two fragments, the second one with a buffer."""

    def __init__(self, seed, outer, model="a model"):
        draw = torch.Generator().manual_seed(seed)
        shapes = ({"first": (7, 3), "second": (5,)}, {"third": (4, 4)})
        local = [
            {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in each.items()}
            for each in shapes
        ]
        buffers = {"mean": torch.randn(6, generator=draw)}
        self.fragments = [
            GlobalParameters(local[0], outer, CPU),
            GlobalParameters(local[1] | buffers, outer, CPU),
        ]
        fingerprint = dict.fromkeys(FIXED, 1) | {"model": model, "outer_optimizer": "SGD()"}
        super().__init__(self.fragments, fingerprint, DiLoCoSettings(schedule=[]))

    def take_outer_step(self):
        with self.outer_step_of([]):
            for fragment in self.fragments:
                values = [torch.sin(theta.detach()) for theta in fragment.theta.values()]
                fragment.take_outer_step(mean_of(fragment.division, [values]))

    def numbers(self):
        return [fragment.flat.tolist() for fragment in self.fragments]


def downloaded(state, name="the first"):
    """A state as a joiner has downloaded it: of another name, and of other bytes, at each step."""
    return copy.deepcopy(state) | {STATE_NAME: name}


@pytest.fixture(params=OUTER)
def outer(request):
    return OUTER[request.param]


def test_a_group_that_was_healed_offers_the_state_under_its_donors_name(outer):
    donor, joiner = State(0, outer), State(1, outer)
    for state in (donor, joiner):
        state.fingerprint["schedule"] = [{"outer_step": 21}]
    donor.take_outer_step()
    sent = b"".join(dump(donor.for_joiner()))
    joiner.take_over(load(memoryview(bytearray(sent))), "the donor")
    assert b"".join(dump(joiner.for_joiner())) == sent


@pytest.fixture
def donor(outer):
    donor = State(0, outer)
    for _ in range(3):
        donor.take_outer_step()
    return donor


@pytest.fixture
def joiner(outer):
    return State(1, outer)


def test_a_heal_from_a_staged_state_is_that_from_any_other(donor, joiner, outer):
    plain, before = State(2, outer), joiner.numbers()
    sent = downloaded(donor.state_dict())
    joiner.stage(sent)
    assert joiner.numbers() == before and joiner.outer_step == 0
    for _ in range(2):  # the second heal is from what it is given
        plain.take_over(sent, "a test")
        joiner.take_over(sent, "a test")
        for _ in range(3):
            assert joiner.numbers() == plain.numbers() == donor.numbers()
            assert joiner.digest() == donor.digest()
            for each in (donor, plain, joiner):  # each in memory of its own
                each.take_outer_step()
        assert joiner.outer_step == donor.outer_step
        sent = copy.deepcopy(donor.state_dict())


def test_the_heal_copies_and_hashes_nothing(donor, joiner, monkeypatch):
    digests = donor.fragment_digests()
    joiner.stage(downloaded(donor.state_dict()))
    again = downloaded(donor.state_dict())  # of the same name
    for saved in again["fragments"]:
        for tensor in saved["theta"].values():
            tensor.fill_(float("nan"))  # whatever is copied now is wrong
    monkeypatch.setattr("composer_replication.diloco.global_state.digest_of_tensors", None)
    joiner.take_over(again, "a test")
    assert joiner.fragment_digests() == digests
    monkeypatch.undo()
    assert joiner.numbers() == donor.numbers()
    joiner.take_outer_step()
    donor.take_outer_step()
    assert joiner.fragment_digests() == donor.fragment_digests() != digests


@pytest.mark.parametrize("has_name", [True, False])  # torchft's own manager gives none
def test_a_later_state_is_taken_over_as_if_nothing_had_been_staged(donor, joiner, has_name):
    joiner.stage(downloaded(donor.state_dict()))
    donor.take_outer_step()
    later = copy.deepcopy(donor.state_dict())
    joiner.take_over(downloaded(later, "the second") if has_name else later, "a test")
    donor.take_outer_step()
    joiner.take_outer_step()
    assert joiner.numbers() == donor.numbers()
    assert joiner.fragment_digests() == donor.fragment_digests()


def test_of_another_model_nothing_is_staged_and_the_heal_says_so(donor, outer):
    joiner = State(1, outer, model="another model")
    sent = downloaded(donor.state_dict())
    for saved in sent["fragments"]:
        saved["theta"].clear()
    joiner.stage(sent)
    with pytest.raises(SettingsMismatch, match="model: 'another model' here, 'a model' there"):
        joiner.take_over(sent, "a test")


def test_a_state_without_a_tensor_is_left_to_the_heal_too(donor, joiner):
    sent, before = downloaded(donor.state_dict()), joiner.numbers()
    del sent["fragments"][1]["theta"]["third"]
    joiner.stage(sent)
    assert joiner.numbers() == before
    with pytest.raises(ValueError, match="global parameter third of a .* received state is miss"):
        joiner.take_over(sent, "a test")


def test_what_was_loaded_is_a_copy(donor, joiner):
    # A joiner's next download may be written into the memory of the one before.
    sent, at = copy.deepcopy(donor.state_dict()), donor.numbers()
    joiner.take_over(sent, "a test")
    donor.take_outer_step()
    for saved in sent["fragments"]:
        for state in (saved["theta"], *saved["optimizer"]["state"].values()):
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7.0)
    assert joiner.numbers() == at
    joiner.take_outer_step()
    assert joiner.numbers() == donor.numbers()


def test_an_outer_step_that_breaks_off_half_way_is_sent_to_nobody(donor):
    with pytest.raises(KeyboardInterrupt), donor.outer_step_of([]):
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="outer step 4 was broken off half way"):
        donor.state_dict()
