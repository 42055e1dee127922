"""Global digests and outer steps of short runs are those of the versions before, bit for bit."""

import json

import pytest
import torch
from golden.real_runs import REAL_RUNS
from golden.record import DIGESTS
from golden.runs import RUNS

FUSED = ("AVX2", "AVX512")
"""Where torch's outer step rounds a product and a sum once, as it did where this was recorded."""

if torch.backends.cpu.get_cpu_capability() not in FUSED:
    pytest.skip(f"recorded with {' or '.join(FUSED)}", allow_module_level=True)

RECORDED = json.loads(DIGESTS.read_text())


@pytest.mark.parametrize("name", RUNS)
def test_simulated_groups_end_with_the_recorded_bits(name):
    assert list(RUNS[name]()) == RECORDED[name]


@pytest.mark.integration
@pytest.mark.parametrize("name", REAL_RUNS)
def test_real_groups_over_gloo_end_with_the_recorded_bits(name):
    assert list(REAL_RUNS[name]()) == RECORDED[name]


def test_each_run_is_recorded_and_no_other():
    assert set(RECORDED) == {**RUNS, **REAL_RUNS}.keys()
