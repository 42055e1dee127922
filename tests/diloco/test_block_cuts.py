"""Where a model is cut into fragments: between blocks, with the largest fragment minimal."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer_replication.diloco.fragments import balanced_cuts, split_model


def runs_between(sizes, cuts):
    return [sum(sizes[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(sizes)])]


@st.composite
def sizes_and_parts(draw):
    sizes = draw(st.lists(st.integers(0, 20) | st.integers(0, 10**12), min_size=1, max_size=9))
    return sizes, draw(st.integers(1, len(sizes)))


@settings(max_examples=150, deadline=None)
@given(sizes_and_parts())
def test_no_cut_into_as_many_runs_has_a_smaller_largest_run(case):
    sizes, parts = case
    cuts = balanced_cuts(sizes, parts)
    assert len(cuts) == parts - 1
    assert [0, *cuts, len(sizes)] == sorted({0, *cuts, len(sizes)}), "a run is empty"
    others = itertools.combinations(range(1, len(sizes)), parts - 1)
    assert max(runs_between(sizes, cuts)) == min(max(runs_between(sizes, each)) for each in others)


GPT2 = [38_597_376, 786_432, *[7_087_872] * 12, 1_536]
"""Parameters of GPT-2's embeddings, blocks and norm."""
LLAMA = [131_072_000, *[218_112_000] * 32, 4_096, 131_072_000]
"""Of a Llama with a vocabulary of 32,000: embedding, blocks, norm and head."""


@pytest.mark.parametrize(
    ("sizes", "parts", "cuts"),
    [
        ([1] * 24, 4, [6, 12, 18]),
        ([1] * 24, 5, [4, 9, 14, 19]),
        ([1] * 24, 7, [3, 6, 9, 12, 16, 20]),
        (GPT2, 2, [5]),
        (GPT2, 4, [1, 4, 9]),
        (GPT2, 8, [1, 2, 3, 4, 5, 6, 9]),
        (LLAMA, 4, [9, 17, 25]),
        (LLAMA, 24, [*range(2, 16), *range(16, 34, 2)]),
    ],
)
def test_the_cuts_are_those_of_checkpoints_that_exist(sizes, parts, cuts):
    assert balanced_cuts(sizes, parts) == cuts


def test_what_is_frozen_does_not_count():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    for layer in model[:3]:
        layer.weight.requires_grad_(False)  # as with adapters: 4 of 20 elements are trained
    assert [len(fragment) for fragment in split_model(model, 2)] == [5, 4]
