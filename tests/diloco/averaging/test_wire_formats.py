"""What each wire format makes of numbers.

Run: pytest tests/diloco/averaging/test_wire_formats.py.
"""

import math

import pytest
import torch

from composer_replication.diloco.averaging.wire_formats import make_wire_format
from composer_replication.diloco.averaging.wire_sizes import PART
from composer_replication.settings import WIRE_FORMATS

ENCODED = WIRE_FORMATS[1:]


def there_and_back(name, values):
    wire_format = make_wire_format(name)
    encoded = torch.empty(wire_format.num_bytes(values.numel()), dtype=torch.uint8)
    wire_format.encode(values, encoded)
    decoded = torch.full_like(values, float("nan"))
    wire_format.decode(encoded, decoded)
    return decoded


def draw(size, *, scale=1.0, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def padded(*values):
    return torch.cat([torch.tensor(values), torch.zeros(PART - len(values))])


def test_bfloat16_is_torchs():
    values = draw(PART * 3, scale=1e-3)
    assert torch.equal(there_and_back("bfloat16", values), values.bfloat16().float())


def test_int8_rounds_to_the_nearest_127th_of_the_largest_in_256():
    values = padded(127.0, 1.4, 1.6, -1.4, -1.6, -126.7)
    values[256:259] = torch.tensor([0.254, 0.0031, -0.001])  # a block of its own
    decoded = there_and_back("int8", values)
    assert decoded[:6].tolist() == [127.0, 1.0, 2.0, -1.0, -2.0, -127.0]
    assert decoded[256:259].tolist() == pytest.approx([0.254, 0.004, 0.0])
    values = draw(PART * 8)
    blocks = values.view(-1, 256)
    step = blocks.abs().amax(1, keepdim=True) / 127
    assert torch.allclose(
        there_and_back("int8", values).view(-1, 256), (blocks / step).round() * step, atol=1e-6
    )


def scale_of(largest, top):
    """The smallest number of 3 bits of mantissa that is not below it, within 32 powers of two."""
    exponent = math.floor(math.log2(largest)) - 3
    return max(math.ceil(largest / 2**exponent) * 2**exponent, top / 2**31.9)


def test_fp4_rounds_to_the_nearest_of_its_grid_at_the_scale_of_each_block():
    values = draw(PART * 4) * torch.logspace(0, -7, PART * 4 // 32).repeat_interleave(32)
    decoded = there_and_back("fp4", values).view(-1, 32)
    blocks = values.view(-1, 32)
    top = float(values.abs().max())
    for block, found in zip(blocks, decoded, strict=True):
        grid = torch.arange(8) * scale_of(float(block.abs().max()), top) / 7
        both = torch.cat([-grid, grid])
        distance = (block[:, None] - both).abs().amin(1)
        assert torch.allclose((block - found).abs(), distance, rtol=1e-4, atol=1e-12)
        assert (found[:, None] - both).abs().amin(1).max() < 1e-5 * float(grid[-1])


@pytest.mark.parametrize("name", ENCODED)
def test_zeros_stay_zeros_and_no_scale_makes_numbers_that_are_none(name):
    assert there_and_back(name, torch.zeros(PART)).tolist() == [0.0] * PART
    # Largest numbers in their blocks, from the largest to what counts as nothing.
    values = torch.zeros(PART)
    values[:: PART // 8] = torch.tensor([3e38, 1e20, 1.0, 1e-10, -1e-20, 1e-29, 1e-38, 1e-45])
    decoded = there_and_back(name, values)
    assert decoded.isfinite().all()
    assert decoded[0] == pytest.approx(3e38, rel=0.07)
    assert torch.equal(decoded[values == 0], values[values == 0])


@pytest.mark.parametrize("name", ENCODED)
def test_no_bias_and_the_error_that_belongs_to_the_format(name):
    # torchft's int8 truncates: a mean of two such is 2 % too small (docs/adrs/ADR-017).
    values = draw(PART * 200, scale=1e-3)
    decoded = there_and_back(name, values)
    shrinks_by = 1 - float(decoded @ values) / float(values @ values)
    error = float((decoded - values).norm() / values.norm())
    assert abs(shrinks_by) < {"bfloat16": 1e-4, "int8": 1e-3, "fp4": 5e-3}[name]
    assert error < {"bfloat16": 2e-3, "int8": 8e-3, "fp4": 0.12}[name]


@pytest.mark.parametrize("name", ENCODED)
def test_rows_of_messages_are_decoded_to_the_bits_of_each(name):
    # In the larger memory in which messages arrive, and into a larger scratch.
    wire_format = make_wire_format(name)
    size = wire_format.num_bytes(3 * PART)
    received = torch.zeros(3, size + 8, dtype=torch.uint8)
    for seed, message in enumerate(received):
        wire_format.encode(draw(3 * PART, scale=10.0**-seed, seed=seed), message[4:-4])
    decoded = torch.full((3, 4 * PART), float("nan"))
    wire_format.decode(received[:, 4:-4], decoded[:, : 3 * PART])
    for seed, row in enumerate(decoded[:, : 3 * PART]):
        expected = there_and_back(name, draw(3 * PART, scale=10.0**-seed, seed=seed))
        assert torch.equal(row, expected)
