"""The tests for GPUs, where there is none. Run: pytest tests/test_stand_in_device.py

Stood in for: the accelerator, by one whose kernels are the CPU's. Needs a C++ compiler.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stand_in_device
import torch

pytestmark = [pytest.mark.integration, pytest.mark.together]

TESTS = Path(__file__).parent

STRICT = """
import stand_in_device, torch
here, pinned = torch.ones(3, device="stand_in"), torch.ones(3).pin_memory()
assert pinned.is_pinned() and not torch.ones(3).is_pinned()
try:
    here + torch.ones(3)
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise AssertionError("it mixes with the host")
late = here.to("cpu", non_blocking=True)
assert late.isnan().all()
torch.accelerator.synchronize()
assert (late == 1).all()
there = pinned.to("stand_in", non_blocking=True)
pinned.fill_(2.0)  # too early
assert (there.cpu() == 2).all()
assert torch.stand_in.memory_allocated() == 24
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    compiler = shutil.which("c++")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/test_gpu.py is for it")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = stand_in_device.build(tmp_path_factory.mktemp("stand_in"), compiler)
    return os.environ | {"PYTHONPATH": str(TESTS), stand_in_device.LIBRARY: str(library)}


def test_it_does_not_mix_with_the_host_and_copies_late(environ):
    command = [sys.executable, "-c", STRICT]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_what_holds_on_a_gpu_holds_on_it(environ):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "stand_in_device", "-rs"]
    answer = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/test_gpu.py"],
        cwd=TESTS.parent,
        env=environ | {"COMPOSER_REPLICATION_TEST_DEVICE": stand_in_device.NAME},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout
    assert " passed, 5 skipped" in answer.stdout and "NCCL" in answer.stdout
