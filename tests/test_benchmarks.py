"""What the benchmarks compute of what they measure. Run: pytest tests/test_benchmarks.py"""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def overlap(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    yield importlib.import_module("overlap")
    sys.modules.pop("overlap")


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
def test_how_much_of_a_sync_kernels_cover(overlap, intervals, expected):
    assert overlap.covered(intervals, (10.0, 14.0)) == pytest.approx(expected)
