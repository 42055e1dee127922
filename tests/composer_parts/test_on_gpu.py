"""Each part of Composer under DiLoCo on a GPU. Run: pytest tests/composer_parts/test_on_gpu.py

Real: Composer's Trainer and its parts, on a CUDA device. Replica groups are threads over the
simulation's shared buffer.
"""

import dataclasses

import pytest
import torch
from composer_parts.fits import NOT_TESTED, REJECTED, check_equal, fit, fit_alone
from composer_parts.test_parts import ONE_AT_A_TIME, PARTS, SEVERAL_FITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Composer's Alibi is for an older transformers than torch 2.11 comes with.
ELSEWHERE = {"Alibi", "LoadCheckpoint"}
TRIED = [
    name
    for name, part in PARTS.items()
    if name not in ELSEWHERE and part.status not in (NOT_TESTED, REJECTED)
]
AMP = 0.05
"""How far a loss in bfloat16 may be from another one, after the outer step has rounded in fp32."""


def on_gpu(name):
    part = PARTS[name]
    part.check_needs()
    return dataclasses.replace(part, build=lambda: {"device": "gpu"} | dict(part.build()))


@pytest.mark.parametrize("name", TRIED)
def test_one_group_trains_as_under_composer_alone_on_a_gpu(name, tmp_path, monkeypatch):
    part = on_gpu(name)
    theirs = fit(part)
    (tmp_path / "ours").mkdir()
    monkeypatch.chdir(tmp_path / "ours")  # some callbacks refuse a folder that has files
    ours = fit_alone(part)
    assert {p.device.type for p in ours.parameters.values()} == {"cuda"}
    skipped = 1 if "fp16" in name else 0  # by the grad scaler
    assert len(ours.losses) - ours.diloco.result["inner_steps"] == skipped
    assert ours.diloco.result["outer_steps"] > 0
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=AMP)
    part.did(ours, theirs)


@pytest.mark.parametrize("name", [n for n in TRIED if n not in {*ONE_AT_A_TIME, *SEVERAL_FITS}])
def test_two_groups_end_equal_on_a_gpu(name):
    check_equal(on_gpu(name))
