"""P4: every trainable parameter is in exactly one fragment; frozen ones are not touched."""

import logging
from functools import partial

import pytest
import torch
from common import Constant, TinyMLP, plain_sgd, take_step
from harness.groups import Group, attempt, run, sgd
from torch import nn

from composer_replication import DiLoCo, simulate
from composer_replication.diloco.fragments import model_fingerprint, split_model
from composer_replication.simulation.simulation import SimulationError


class Transformer(nn.Module):
    """A GPT's outline: two embeddings, 12 blocks with containers inside, a norm and a head."""

    def __init__(self, tied=True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))})
            for _ in range(12)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.wte.weight


LAYERS = [[f"layers.{n}.{kind}" for kind in ("weight", "bias")] for n in (0, 2, 4)]
"""The names in ``TinyMLP``."""


def names(model, *arguments, **named):
    return [list(fragment) for fragment in split_model(model, *arguments, **named)]


def test_a_model_is_one_fragment_or_is_cut_between_layers():
    assert names(TinyMLP()) == [sum(LAYERS, [])]
    assert names(TinyMLP(), 3) == LAYERS


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_fragments_follow_the_model_and_no_block_is_cut_apart(tied, count):
    model = Transformer(tied)
    fragments = names(model, count)
    assert sum(fragments, []) == [name for name, _ in model.named_parameters()]  # tied ones once
    homes = [{name.split(".mlp")[0] for name in f if ".mlp" in name} for f in fragments]
    assert sum(map(len, homes)) == 12


def test_patterns_make_the_fragments_and_the_first_match_counts():
    patterns = ["*.bias", ["layers.0.*", "layers.2.*"], "*"]
    weights, biases = zip(*LAYERS, strict=True)
    assert names(TinyMLP(), fragment_patterns=patterns) == [
        [*biases],
        [*weights[:2]],
        [weights[2]],
    ]


def test_adapters_may_be_named_as_peft_writes_them_and_their_exact_names_come_first():
    model = nn.Module()
    for layer in ("q", "v"):
        lora = nn.Module()
        for matrix in ("lora_A", "lora_B"):
            lora.add_module(matrix, nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)}))
        model.add_module(layer, lora)
    qa, qb, va, vb = (f"{q}.lora_{a}.default.weight" for q in "qv" for a in "AB")
    exact = [["*lora_A.default.weight", "*lora_B.default.weight"]]
    assert names(model, fragment_patterns=exact) == [[qa, qb, va, vb]]
    written = ["*.lora_A.weight", "*.lora_B.weight"]
    assert names(model, fragment_patterns=written) == [[qa, va], [qb, vb]]
    both = ["*.lora_A.weight", ["q.*.default.*", "*.lora_B.weight"]]  # q's by their exact names
    assert names(model, fragment_patterns=both) == [[va], [qa, qb, vb]]


def test_modules_are_one_fragment_each_and_a_tied_weight_is_in_the_first_that_has_it():
    layers = TinyMLP().layers
    assert names([layers[0], layers[2]]) == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    model = Transformer()
    tied = [model.wte, nn.ModuleList([model.norm, model.head])]
    assert names(tied) == [["0.weight"], ["1.0.weight", "1.0.bias"]]


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        (TinyMLP(), {"num_fragments": 4}, "num_fragments=4 but the model has 3 blocks"),
        (nn.ReLU(), {}, "no trainable parameter"),
        (TinyMLP(), {"fragment_patterns": ["layers.0.*", "layers.2.*"]},
         "leave out layers.4.weight, layers.4.bias"),
        (TinyMLP(), {"fragment_patterns": ["*layers*", "lm_head.*"]},
         r"\['lm_head.*'\] matches no parameter"),
        ([nn.Linear(2, 2), nn.ReLU()], {}, r"model_fragments\[1\] \(ReLU\) has no trainable"),
        ([], {}, r"model_fragments=\[\]: pass the model"),
        ([nn.Linear(2, 2)], {"num_fragments": 2}, "leave num_fragments and fragment_patterns out"),
        ([nn.Linear(2, 2)] * 2, {}, r"weight is in model_fragments\[0\] and \[1\]"),
        ([(pair := nn.Sequential(nn.Linear(2, 2))), pair[0]], {},
         r"weight is in model_fragments\[0\] and \[1\]"),
    ],
)  # fmt: skip
def test_a_split_that_misses_or_repeats_something_is_refused_by_name(model, split, message):
    with pytest.raises(ValueError, match=message):
        split_model(model, **split)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LazyLinear(2), "parameter weight has no values yet"),
        (nn.Linear(2, 2, device="meta"), "parameter weight has no values yet"),
        (nn.Linear(2, 2, dtype=torch.complex64), "weight has dtype torch.complex64, which is not"),
    ],
)
def test_a_parameter_that_cannot_be_averaged_is_refused_by_name(model, message):
    with pytest.raises(ValueError, match=message):
        split_model(model)


def test_the_fingerprint_knows_names_shapes_and_dtypes():
    models = (TinyMLP(), TinyMLP(width=17), TinyMLP().bfloat16(), nn.Linear(8, 4))
    prints = {model_fingerprint(split_model(model)) for model in models}
    assert len(prints) == 4
    assert model_fingerprint(split_model(TinyMLP(seed=3))) in prints
    assert model_fingerprint(split_model(TinyMLP(), 3)) in prints


@pytest.mark.parametrize(("count", "said"), [(1, []), (3, ["67 %"]), (8, ["67 %", "5.3 times"])])
def test_a_group_says_at_its_start_how_large_the_largest_fragment_is(caplog, count, said):
    def replica(sim):
        # A layer of 400 parameters and ten of 20.
        model = nn.Sequential(nn.Embedding(100, 4), *(nn.Linear(4, 4) for _ in range(10)))
        Group(sim, model, sync_every=24, num_fragments=count)

    with caplog.at_level(logging.INFO):
        simulate(replica, num_replicas=1)
    messages = [each for each in caplog.messages if each.startswith("The largest of")]
    assert len(messages) == len(said)
    assert all(text in message for text, message in zip(said, messages, strict=True))


# ---- what is not in a fragment, or in two modules, while it trains -----------------------------


def test_one_fragments_sync_leaves_the_other_fragment_alone():
    # torchft with one shared outer optimizer: the other fragment moves by 9.50 (0.7 * 1.9 * 7.14).
    def replica(group):
        group.step(-7.14, -7.14)
        assert len(group.reports) == 1
        return group.local

    model = partial(Constant, a=(1,), b=(1,))
    settings = {"sync_every": 4, "fragment_patterns": ["a", "b"]}
    still = partial(torch.optim.SGD, lr=0.0)
    assert run(1, replica, model=model, inner=still, **settings) == [[10.0, 10.0]]


def test_a_frozen_parameter_is_neither_sent_nor_backed_up_nor_decayed():
    # torchft: 4 allreduces and 9004 elements backed up instead of 4004; outer weight decay 0.1
    # moves the frozen weight by 0.067 in 2 rounds.
    def model():
        made = Constant(1.0, frozen=(5000,), trained=(4000,), scale=(4,))
        made.frozen.requires_grad_(False)
        return made

    def replica(group):
        group.step(-0.1, -0.1)
        held = sum(t.numel() for t in group.diloco.global_parameters().values())
        return held, group.reports[0].bytes_sent, group.model.frozen.unique().tolist()

    decaying = partial(torch.optim.SGD, lr=0.7, weight_decay=0.1)
    assert run(1, replica, model=model, outer=decaying, sync_every=1) == [
        (4004, 4 * (4004 + 1), [1.0])
    ]


def with_b_frozen():
    made = Constant(a=(2,), b=(3,))
    made.b.requires_grad_(False)
    return made


def test_what_is_also_synced_is_frozen_and_belongs_to_the_global_state():
    def replica(group):
        group.step(*[1.0] * 4)
        return group.diloco.global_parameters()["b"].tolist(), group.local[0]

    ((b, a),) = run(1, replica, model=with_b_frozen, sync_every=2, also_synced=["b"])
    assert b == [10.0] * 3 and a > 10


def test_training_what_was_frozen_when_it_began_is_an_error_that_names_it():
    def replica(group):
        group.step(1.0)
        group.model.b.requires_grad_(True)
        group.step(1.0)

    with pytest.raises(SimulationError, match="frozen when training began, and trained now: b"):
        run(1, replica, model=with_b_frozen, sync_every=2)


def test_weights_tied_over_two_fragments_move_once():
    # torchft: one step of -1, then none, and the weight goes 9.30, 9.51, 9.447, 9.466, ...
    def replica(sim):
        model = nn.Sequential(Constant(), Constant(3.0), Constant())
        model[2].weight = model[0].weight
        inner = sgd(model.parameters())
        parts = [model[0], nn.Sequential(model[1], model[2])]
        seen = []
        with DiLoCo(sim.manager, parts, inner, plain_sgd(0.7), sync_every=2):
            for move in (-1.0, 0.0, 0.0, 0.0):
                take_step(inner, move)
                seen.append(round(model[0].weight.item(), 5))
        return seen

    assert simulate(replica, num_replicas=1) == [[9.3] * 4]


def test_a_gradient_monitor_still_sees_the_gradient_after_a_sync():
    # torchft's outer zero_grad leaves p.grad None after every sync.
    def replica(group):
        group.step(-1.0)
        return group.model.weight.grad.item()

    assert run(1, replica, sync_every=1) == [1.0]


def test_steps_that_are_not_training_do_not_count():
    def replica(group):
        group.step(-1.0)
        group.diloco.counts_steps = False
        group.step(0.0)
        group.diloco.counts_steps = True
        assert group.diloco.inner_steps == 1 and not group.reports
        group.step(-1.0)
        return group.diloco.inner_steps, group.diloco.outer_step

    assert run(1, replica, sync_every=2) == [(2, 1)]


def test_two_diloco_on_one_manager_and_an_async_quorum_are_refused():
    def replica(sim):
        Group(sim)
        told = attempt(Group)(sim)  # torchft: AssertionError ''
        assert "has a DiLoCo already: use one " in told and told.endswith(" optimizers)")
        sim.manager._use_async_quorum = True
        assert "use_async_quorum=False" in attempt(Group)(sim)

    simulate(replica, num_replicas=1)
