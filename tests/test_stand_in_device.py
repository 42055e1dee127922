"""The tests for GPUs, where there is none. Run: pytest tests/test_stand_in_device.py

Stood in for: the accelerator, by one whose kernels are the CPU's. Needs a C++ compiler.
"""

import json
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
def environ(pytestconfig):
    compiler = shutil.which("c++")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/test_gpu.py is for it")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = stand_in_device.build(pytestconfig.cache.mkdir("stand_in_device"), compiler)
    folders = [str(TESTS), str(TESTS.parent / "benchmarks")]
    path = os.pathsep.join([*folders, *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": path, stand_in_device.LIBRARY: str(library)}


def test_it_does_not_mix_with_the_host_and_copies_late(environ):
    command = [sys.executable, "-c", STRICT]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr


def test_what_holds_on_a_gpu_holds_on_it(environ):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "stand_in_device", "-rs"]
    answer = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/test_gpu.py"],
        cwd=TESTS.parent,
        env=environ | {"TEST_DEVICE": stand_in_device.NAME},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout
    assert " passed, 10 skipped" in answer.stdout and "NCCL" in answer.stdout


BUCKETS = 6
"""How many messages of 64 MiB a sync of 100 M parameters has, in fp32."""

DELAY = {"fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
AT_REST = {"backup_device": "cpu"}


CASES = [
    ({}, 32 + BUCKETS, 0, 4.05),
    ({"dtype": "bfloat16"}, 32 + BUCKETS, 0, 4.05),
    (DELAY, 32 + BUCKETS, 0, 8.05),
    (AT_REST, 32 + 5 * BUCKETS, 12, 6.1),
    (AT_REST | DELAY | {"dtype": "bfloat16"}, 32 + 12 * BUCKETS, 12, 8.05),
    ({"wire_format": "int8"}, 32 + 14 * BUCKETS, 0, 8.05),
    ({"wire_format": "fp4"}, 32 + 37 * BUCKETS, 0, 8.05),
]
"""Settings; at most how many operations a sync takes with them, how many bytes a parameter go to
the device, and how many of its memory are taken."""


@pytest.fixture(scope="module")
def counted(environ):
    """What a sync does with 147 tensors, with 1,000, and in a group alone, for each of CASES."""
    every = [
        settings | more
        for settings, *_ in CASES
        for more in ({"tensors": 147}, {"tensors": 1000}, {"groups": 1})
    ]
    command = [sys.executable, str(TESTS / "counted_sync.py"), json.dumps(every)]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    return [found[start : start + 3] for start in range(0, len(found), 3)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[str(settings) for settings, *_ in CASES])
def test_what_a_sync_does_there_does_not_grow_with_the_tensors(case, counted):
    _, operations, host_bytes, peak = CASES[case]
    few, many, alone = counted[case]
    assert _total(few, "device operations") == _total(many, "device operations") <= operations
    for tensors, found in ((147, few), (1000, many)):
        assert not found["step"] and found["prepare_sync"]["waits"] <= 2
        assert _total(found, "waits") <= 10
        assert _total(found, "pageable copies") == _total(found, "awaited copies") == 0
        # Next to nothing for each tensor, and all of it together as little as for a few of them.
        small = (4096 + 16 * tensors) / 1_000_000
        assert _total(found, "H2D bytes") <= host_bytes + small
        assert _total(found, "D2H bytes") <= (8 if host_bytes else 0) + small
        assert _total(found, "fresh host bytes") < 10 * small
        assert host_bytes or _total(found, "host passes") < 10 * small
    assert 4 <= max(each.get("peak bytes", 0) for each in alone.values()) <= peak


def _total(found, what):
    return sum(each.get(what, 0) for each in found.values())
