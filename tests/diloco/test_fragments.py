"""Fragments: every trainable parameter in exactly one, or an error that names it."""

import copy
import logging

import pytest
import torch
from common import TinyMLP
from torch import nn

from composer_replication.diloco.algorithm import DiLoCo
from composer_replication.diloco.fragments import (
    check_trained_by,
    model_fingerprint,
    split_model,
)
from composer_replication.simulation.simulation import simulate


class Transformer(nn.Module):
    """Embedding, four blocks, a norm and a head tied to the embedding: a GPT's outline."""

    def __init__(self, width=8, vocabulary=12, tied=True):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight


def names(fragments):
    return [list(fragment) for fragment in fragments]


def test_a_whole_model_is_one_fragment_with_tied_weights_once():
    (fragment,) = split_model(Transformer())
    assert "wte.weight" in fragment and "head.weight" not in fragment
    assert len(fragment) == len(list(Transformer().parameters()))


def test_a_plain_stack_of_layers_is_cut_between_layers():
    assert names(split_model(TinyMLP(), 3)) == [
        ["layers.0.weight", "layers.0.bias"],
        ["layers.2.weight", "layers.2.bias"],
        ["layers.4.weight", "layers.4.bias"],
    ]


def test_frozen_parameters_are_in_no_fragment():
    model = TinyMLP()
    model.layers[0].requires_grad_(False)
    assert names(split_model(model)) == [
        ["layers.2.weight", "layers.2.bias", "layers.4.weight", "layers.4.bias"]
    ]


def test_patterns_make_the_fragments_and_the_first_match_counts():
    fragments = split_model(
        TinyMLP(), fragment_patterns=["*.bias", ["layers.0.*", "layers.2.*"], "*"]
    )
    assert names(fragments) == [
        ["layers.0.bias", "layers.2.bias", "layers.4.bias"],
        ["layers.0.weight", "layers.2.weight"],
        ["layers.4.weight"],
    ]


def test_adapters_may_be_named_as_peft_writes_them_and_their_exact_names_come_first():
    model = nn.Module()
    for layer in ("q", "v"):
        lora = nn.Module()
        for matrix in ("lora_A", "lora_B"):
            lora.add_module(matrix, nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)}))
        model.add_module(layer, lora)
    exact = [["*lora_A.default.weight", "*lora_B.default.weight"]]
    assert [len(f) for f in split_model(model, fragment_patterns=exact)] == [4]
    written = ["*.lora_A.weight", "*.lora_B.weight"]
    assert [sorted(f) for f in split_model(model, fragment_patterns=written)] == [
        ["q.lora_A.default.weight", "v.lora_A.default.weight"],
        ["q.lora_B.default.weight", "v.lora_B.default.weight"],
    ]
    both = ["*.lora_A.weight", ["q.*.default.*", "*.lora_B.weight"]]  # q's by their exact names
    assert [sorted(f) for f in split_model(model, fragment_patterns=both)] == [
        ["v.lora_A.default.weight"],
        ["q.lora_A.default.weight", "q.lora_B.default.weight", "v.lora_B.default.weight"],
    ]


def test_a_sequence_of_modules_is_one_fragment_each():
    model = TinyMLP()
    assert names(split_model([model.layers[0], model.layers[2], model.layers[4]])) == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
        ["2.weight", "2.bias"],
    ]


def test_a_sequence_keeps_a_tied_weight_in_the_fragment_that_has_it_first():
    model = Transformer()
    first, second = split_model([model.wte, nn.ModuleList([model.norm, model.head])])
    assert list(first) == ["0.weight"]
    assert list(second) == ["1.0.weight", "1.0.bias"]


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (TinyMLP(), {"num_fragments": 4}, "num_fragments=4 but the model has 3 blocks"),
        (nn.ReLU(), {}, "no trainable parameter"),
        (
            TinyMLP(),
            {"fragment_patterns": ["layers.0.*", "layers.2.*"]},
            "leave out layers.4.weight, layers.4.bias",
        ),
        (
            TinyMLP(),
            {"fragment_patterns": ["*layers*", "lm_head.*"]},
            r"\['lm_head.*'\] matches no parameter",
        ),
        ([nn.Linear(2, 2), nn.ReLU()], {}, r"model_fragments\[1\] \(ReLU\) has no trainable"),
        ([], {}, r"model_fragments=\[\]"),
    ],
)
def test_a_split_that_cannot_be_is_refused_by_name(model, split, message):
    with pytest.raises(ValueError, match=message):
        split_model(model, **split)


@pytest.mark.parametrize("again", ["the same module", "a part of it"])
def test_overlapping_modules_are_refused_by_name(again):
    model = TinyMLP()
    other = model if again == "the same module" else model.layers[0]
    with pytest.raises(ValueError, match=r"weight is in model_fragments\[0\] and \[1\]"):
        split_model([model, other])


def test_a_parameter_of_the_optimizer_in_no_fragment_is_refused():
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="in the inner optimizer but in no fragment"):
        check_trained_by(split_model([model.layers[0], model.layers[2]]), optimizer)


def test_fragments_of_a_copy_of_the_model_are_refused():
    model = TinyMLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="not in the inner optimizer: layers.0.weight"):
        check_trained_by(split_model(copy.deepcopy(model)), optimizer)


def test_the_fingerprint_knows_names_shapes_and_dtypes():
    prints = {
        model_fingerprint(split_model(model))
        for model in (TinyMLP(), TinyMLP(width=17), TinyMLP().bfloat16(), nn.Linear(8, 4))
    }
    assert len(prints) == 4
    assert model_fingerprint(split_model(TinyMLP(seed=3))) in prints
    assert model_fingerprint(split_model(TinyMLP(), 3)) in prints


@pytest.mark.parametrize(("count", "said"), [(1, []), (3, ["67 %"]), (8, ["67 %", "5.3 times"])])
def test_a_group_says_at_its_start_how_large_the_largest_fragment_is(caplog, count, said):
    def replica(sim):
        # A layer of 400 parameters and ten of 20.
        model = nn.Sequential(nn.Embedding(100, 4), *(nn.Linear(4, 4) for _ in range(10)))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(sim.manager, model, inner, sync_every=24, num_fragments=count)

    with caplog.at_level(logging.INFO):
        simulate(replica, num_replicas=1)
    messages = [each for each in caplog.messages if each.startswith("The largest of")]
    assert len(messages) == len(said)
    assert all(text in message for text, message in zip(said, messages, strict=True))
