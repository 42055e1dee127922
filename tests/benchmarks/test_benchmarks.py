"""What the benchmarks compute of what they measure.

Run: pytest tests/benchmarks/test_benchmarks.py.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    loaded = []

    def load_module(name):
        loaded.append(name)
        return importlib.import_module(name)

    yield load_module
    for name in loaded:
        sys.modules.pop(name)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0.0),
        ([(0.0, 20.0)], 1.0),
        ([(10.0, 11.0), (13.0, 14.0)], 0.5),
        ([(10.0, 12.0), (11.0, 13.0), (10.5, 11.5)], 0.75),  # two streams at the same time
        ([(8.0, 11.0), (13.5, 99.0)], 0.375),
        ([(0.0, 10.0), (14.0, 15.0)], 0.0),
    ],
)
def test_how_much_of_a_sync_kernels_cover(load, intervals, expected):
    assert load("overlap").covered(intervals, (10.0, 14.0)) == pytest.approx(expected)


@pytest.mark.parametrize("levels", ["E2M1", "E3M0"])
@pytest.mark.parametrize("has_blocks", [True, False])
def test_the_formats_that_fp4_is_compared_with_have_their_sizes_and_no_others(
    load, levels, has_blocks
):
    floating = load("floating_fp4")
    sizes = torch.tensor(floating.LEVELS[levels])
    wire_format = floating.FloatingFp4(levels, has_blocks)
    values = torch.cat([sizes, -sizes]).repeat(64) * 8.0
    encoded = torch.empty(wire_format.num_bytes(values.numel()), dtype=torch.uint8)
    decoded = torch.empty_like(values)
    for shift in (0.0, 0.01, -0.01):  # to the nearest
        wire_format.encode(values + shift * (values.abs() < 8.0), encoded)
        wire_format.decode(encoded, decoded)
        assert torch.equal(decoded.abs(), values.abs())
        assert torch.equal(decoded.sign(), values.sign())
    one_block = values[:32].clone()
    one_block[:] = 0.07  # beside a block with an 8 in it
    wire_format.encode(torch.cat([one_block, values[32:]]), encoded)
    wire_format.decode(encoded, decoded)
    assert (decoded[0].item() == pytest.approx(0.07, rel=0.07)) == has_blocks
