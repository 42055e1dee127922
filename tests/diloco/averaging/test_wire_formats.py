"""What each wire format makes of numbers.

Run: pytest tests/diloco/averaging/test_wire_formats.py.
"""

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
