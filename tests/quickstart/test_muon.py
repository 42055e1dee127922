"""The inner optimizer Muon. Run: pytest tests/quickstart/test_muon.py

Its update is compared with one by singular value decomposition in double precision, written down
here. Real: torch's optimizers.
"""

import logging
import math

import pytest
import torch
from common import TinyMLP, batch, mse, muon_by_shape
from torch import nn

from examples.quickstart.byte_gpt import ByteGPT
from examples.quickstart.muon import Muon, muon_update

# ---- the update ------------------------------------------------------------------------------


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def iterated(singular):
    """Five times the published polynomial."""
    for _ in range(5):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return singular


def reference_update(matrix):
    """The iteration acts on each singular value alone: U f(S / norm) V', times the scale."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    scale = 0.2 * math.sqrt(max(matrix.shape))
    return (scale * (u * iterated(s / s.norm())) @ vh).to(matrix.dtype)


SHAPES = [(24, 72), (72, 24), (24, 24), (96, 24), (1, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_update_is_the_references(shape):
    matrix = randn(1, *shape) * 1e-3
    kept = matrix.clone()
    torch.testing.assert_close(muon_update(matrix), reference_update(matrix), rtol=0, atol=2e-4)
    assert torch.equal(matrix, kept)  # it may be the momentum itself


def test_the_length_of_the_step_does_not_depend_on_that_of_the_gradient():
    matrix = randn(2, 8, 12)
    for factor in (1e-5, 1e5):
        torch.testing.assert_close(muon_update(matrix), muon_update(factor * matrix))
    assert torch.equal(muon_update(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert muon_update(torch.full((3, 4), float("nan"))).isnan().all()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_the_matrix_of_its_outputs(memory_format):
    weight = randn(4, 6, 4, 3, 3)
    update = muon_update(weight.to(memory_format=memory_format))
    assert update.shape == weight.shape
    expected = reference_update(weight.flatten(1)).view(6, 4, 3, 3)
    torch.testing.assert_close(update, expected, rtol=0, atol=2e-4)


# ---- steps -----------------------------------------------------------------------------------


def take_steps(optimizers, parameters, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for p in parameters:
            if p.requires_grad:
                p.grad = torch.randn(p.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_the_reference(nesterov):
    p = nn.Parameter(randn(5, 6, 10))
    expected, momentum = p.detach().clone(), torch.zeros(6, 10)
    optimizer = Muon(
        [{"params": p, "use_muon": True}],
        **{"lr": 0.1, "momentum": 0.8, "weight_decay": 0.5, "nesterov": nesterov},
    )
    for step in range(4):
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (step + 1)
        p.grad = randn(step, 6, 10)
        momentum = 0.8 * momentum + 0.2 * p.grad
        ahead = 0.8 * momentum + 0.2 * p.grad if nesterov else momentum
        expected = expected * (1 - lr * 0.5) - lr * reference_update(ahead)
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-4)


def test_the_rest_is_trained_by_adamw_to_the_bit():
    ours, theirs = TinyMLP(seed=1), TinyMLP(seed=1)
    settings = {"lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.9), "eps": 1e-6}
    biases = [[p for p in model.parameters() if p.ndim == 1] for model in (ours, theirs)]
    muon = muon_by_shape(ours.parameters(), **settings)
    adamw = torch.optim.AdamW(biases[1], **settings)
    take_steps([muon], biases[0], 0, 5)
    take_steps([adamw], biases[1], 0, 5)
    for p, q in zip(*biases, strict=True):
        assert torch.equal(p, q) and muon.state[p].keys() == adamw.state[q].keys()


def test_a_parameter_that_is_frozen_or_without_a_gradient_stays_as_it_is():
    model = TinyMLP(seed=2)
    frozen = [*model.layers[0].parameters()]
    for p in frozen:
        p.requires_grad_(False)
    kept = [p.clone() for p in frozen]
    optimizer = muon_by_shape(model.parameters(), weight_decay=1.0)
    mse(model, *batch(0, 0)).backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(frozen, kept, strict=True))
    assert not any(p in optimizer.state for p in frozen)
    assert len(optimizer.state) == 4
    for p in frozen:  # as when layers are thawed in mid-run
        p.requires_grad_(True)
    mse(model, *batch(0, 1)).backward()
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(frozen, kept, strict=True))


def test_it_goes_on_from_a_state_dict_to_the_bit():
    one, other = TinyMLP(seed=3), TinyMLP(seed=3)
    whole, first = (muon_by_shape(model.parameters()) for model in (one, other))
    take_steps([whole], [*one.parameters()], 0, 7)
    take_steps([first], [*other.parameters()], 0, 3)
    second = muon_by_shape(other.parameters(), lr=7.0)
    second.load_state_dict(first.state_dict())
    take_steps([second], [*other.parameters()], 3, 7)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def other_optimizers(parameters):
    matrix, *rest = parameters
    groups = [{"params": matrix, "use_muon": True}, {"params": rest, "use_muon": False}]
    one = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
    return Muon(groups[::-1]), torch.optim.AdamW(one), torch.optim.SGD(one, momentum=0.9)


@pytest.mark.parametrize("which", range(3))
def test_the_state_of_other_groups_or_another_optimizer_is_an_error(which):
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    saved = other_optimizers(parameters)[which]
    take_steps([saved], parameters, 0, 1)
    sizes = [len(group["params"]) for group in saved.param_groups]
    groups = [
        {"params": parameters[: sizes[0]], "use_muon": True},
        {"params": parameters[sizes[0] :], "use_muon": False},
    ]
    with pytest.raises(ValueError, match="or Muon trained other parameters then: use the adamw_na"):
        Muon(groups).load_state_dict(saved.state_dict())


def test_a_closure_is_evaluated_with_gradients():
    model = TinyMLP(seed=4)
    optimizer = muon_by_shape(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = mse(model, *batch(0, 0))
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(20)]
    assert losses[-1] < losses[0]


# ---- which parameters ------------------------------------------------------------------------


def trained_by(optimizer, model):
    """The names of Muon's parameters, and those of AdamW's."""
    names = {id(p): name for name, p in model.named_parameters()}
    return tuple(
        {
            names[id(p)]
            for group in optimizer.param_groups
            for p in group["params"]
            if group["use_muon"] == use_muon
        }
        for use_muon in (True, False)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_gpt_muon_gets_the_matrices_of_the_blocks(tied, caplog):
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 8}
    model = ByteGPT(**sizes, tie_word_embeddings=tied)
    with caplog.at_level(logging.INFO):
        optimizer = Muon(model.named_parameters())
    muon, adamw = trained_by(optimizer, model)
    assert "param_names" not in optimizer.param_groups[0]  # they would be in every checkpoint
    layers = ("qkv", "attn_out", "up_proj", "down_proj")
    assert muon == {f"blocks.{k}.{layer}.weight" for k in range(2) for layer in layers}
    assert adamw == {name for name, _ in model.named_parameters()} - muon
    outer = ["wte.weight", "wpe.weight"] + ([] if tied else ["lm_head.weight"])
    assert adamw >= {*outer, "norm_f.weight", "norm_f.bias", "blocks.0.norm_1.weight"}
    assert f"AdamW {len(adamw)}; matrices among these: {', '.join(outer)}" in caplog.text


OUTER = """
    transformer.wte.weight model.model.embed_tokens.weight model.lm_head.weight
    bert.embeddings.word_embeddings.weight tok_embeddings.weight output.weight model.output.weight
    embed_out.weight gpt_neox.embed_in.weight patch_embed.proj.weight pos_emb.weight head.weight
    heads.head.weight classifier.weight
""".split()
HIDDEN = """
    transformer.blocks.0.attn.Wqkv.weight model.layers.3.self_attn.q_proj.weight
    encoder.layer.0.attention.output.dense.weight encoder.layer.0.output.dense.weight
    multi_head_attention.out_proj.weight layers.0.header.weight ensemble.0.weight layer1.0.conv1
""".split()


@pytest.mark.parametrize("name", OUTER + HIDDEN)
def test_embeddings_and_output_layers_are_known_by_their_names(name):
    named = [(name, nn.Parameter(torch.ones(2, 2))), ("hidden", nn.Parameter(torch.ones(2, 2)))]
    [first, *_] = (group for group in Muon(named).param_groups if named[0][1] is group["params"][0])
    assert first["use_muon"] == (name in HIDDEN)


def test_other_names_can_be_given():
    model = TinyMLP()
    muon, adamw = trained_by(Muon(model.named_parameters(), adamw_names=r"layers\.[04]\."), model)
    assert muon == {"layers.2.weight"} and len(adamw) == 5


def test_groups_of_llm_foundry_are_divided_by_shape_and_keep_what_is_their_own():
    model = ByteGPT(d_model=16, n_heads=2, n_layers=1, max_seq_len=8)
    outer = {
        name: p for name, p in model.named_parameters() if name in ("wte.weight", "wpe.weight")
    }
    rest = {name: p for name, p in model.named_parameters() if name not in outer}
    groups = [{"params": rest.values()}, {"params": [*outer.values()], "use_muon": False, "lr": 3}]
    optimizer = Muon(params=groups, lr=1.0)
    _, adamw = trained_by(optimizer, model)
    assert adamw >= {"wte.weight", "wpe.weight", "norm_f.bias", "blocks.0.norm_1.weight"}
    assert [(group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [
        *((True, 1.0), (False, 1.0), (False, 3))
    ]


def one(*shape):
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Muon(TinyMLP().parameters()), r"without names: pass model.named_parameters\(\)"),
        (lambda: Muon([("bias", one(3))]), "no matrix of a hidden layer for Muon, and 1 param"),
        (lambda: Muon([("w", one(2, 2))], adamw_names="("), r"adamw_names='\(' is no regular"),
        (lambda: Muon([("w", one(2, 2))], lr=-1.0), "lr=-1.0: use a number of 0 or more"),
        (
            lambda: Muon([("w", one(2, 2))], momentum=1.0),
            "momentum=1.0: use numbers from 0 to below 1",
        ),
        (lambda: Muon([("w", one(2, 2))], betas=(0.9, 1.5)), r"betas=\(0.9, 1.5\): use numbers"),
        (
            lambda: Muon([{"params": one(3), "use_muon": True}]),
            r"parameter of shape \(3,\): set use_muon=False for it. If FSDP1 has",
        ),
        (
            lambda: Muon([("w", one(2, 2))]).add_param_group({"params": [one(3)]}),
            "lacks use_muon: set it to True or False",
        ),
    ],
)
def test_what_cannot_be_is_an_error_with_the_fix(build, message):
    with pytest.raises(ValueError, match=message):
        build()
