"""How large the fragments are beside each other, as a group says it at its start."""

import logging

import pytest
import torch
from common import TinyMLP
from torch import nn

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.fragment_sizes import log_sizes
from composer_replication.diloco.fragments import split_model
from composer_replication.diloco.settings import DiLoCoSettings
from composer_replication.simulation.simulation import simulate


class Lopsided(nn.Sequential):
    """A layer of 400 parameters and ten of 20."""

    def __init__(self):
        super().__init__(nn.Embedding(100, 4), *(nn.Linear(4, 4) for _ in range(10)))


def said_of(caplog, model, **settings):
    """What is logged of a model's fragments: information, and a warning if there is one."""
    settings = DiLoCoSettings(**settings)
    fragments = split_model(model, settings.num_fragments, settings.fragment_patterns)
    with caplog.at_level(logging.INFO):
        log_sizes(model, settings, fragments)
    assert all(record.levelno <= logging.WARNING for record in caplog.records)
    return caplog.messages


def test_the_share_of_the_largest_fragment_is_said(caplog):
    said = said_of(caplog, Lopsided(), sync_every=12, num_fragments=3)
    assert said == ["The largest of 3 fragments has 67 % of the bytes"]


def test_nothing_is_said_of_a_model_in_one_fragment(caplog):
    assert said_of(caplog, Lopsided()) == []


def test_a_fragment_that_is_too_large_is_warned_of_with_a_number_that_fits(caplog):
    share, warning = said_of(caplog, Lopsided(), sync_every=24, num_fragments=8)
    assert share == "The largest of 8 fragments has 67 % of the bytes"
    assert warning.startswith(
        "The largest of 8 fragments has 5.3 times the bytes of an equal share; its largest "
        "parameter is 0.weight."
    )
    # 3 fragments would have twice an equal share.
    assert warning.endswith("is never cut apart: use num_fragments=3")


def test_the_number_that_fits_divides_the_round(caplog):
    *_, warning = said_of(caplog, Lopsided(), sync_every=20, num_fragments=10)
    assert warning.endswith("use num_fragments=2")


def test_what_is_frozen_and_synced_counts_in_the_advice(caplog):
    model = Lopsided()
    model[0].requires_grad_(False)
    settings = DiLoCoSettings(sync_every=8, num_fragments=8)
    frozen = ["0.weight"]
    with caplog.at_level(logging.WARNING):
        log_sizes(model, settings, split_model(model, 8, None, frozen), frozen)
    assert caplog.messages[-1].endswith("use num_fragments=2")


@pytest.mark.parametrize("kind", ["patterns", "modules"])
def test_fragments_that_people_make_themselves_have_another_fix(caplog, kind):
    if kind == "patterns":
        patterns = ["0.*", "1.*", "2.*", "*"]
        *_, warning = said_of(caplog, Lopsided(), sync_every=4, fragment_patterns=patterns)
        assert "Divide its patterns among several entries of fragment_patterns" in warning
        return
    model = Lopsided()
    modules = [model[0], model[1], model[2], model[3]]
    *_, warning = said_of(caplog, modules, sync_every=4)
    assert "Give its modules as several of model_fragments" in warning


def test_a_group_says_it_as_it_starts(caplog):
    def replica(sim):
        model = TinyMLP()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(sim.manager, model, inner, sync_every=3, num_fragments=3)

    with caplog.at_level(logging.INFO):
        simulate(replica, num_replicas=1)
    assert "The largest of 3 fragments has 56 % of the bytes" in caplog.messages
