"""The launcher with a command of the user's own that needs packages which only llm-foundry brings.

Run: make test-llmfoundry. Real: everything. The data are made here.
"""

import sys

import pytest
from harness import foundry
from harness.foundry import OFFLINE
from harness.launching import ROOT, launch
from run_events import syncs_of

pytestmark = [
    pytest.mark.llmfoundry,
    pytest.mark.timeout(500),  # more than that of the launcher: after it nobody would stop it
    pytest.mark.skipif(not foundry.is_installed(), reason=foundry.NOT_INSTALLED),
]

EXAMPLES = ROOT / "examples"


def test_a_script_with_a_hugging_face_model_in_groups_of_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    script = [sys.executable, EXAMPLES / "train_hf.py", "30ba"]
    options = ["--nproc", "2", "--set", "sync_every=10"]
    summary, _ = launch(tmp_path, *options, "--", *script, **OFFLINE, TMPDIR=str(tmp_path))
    assert summary["outer_steps"] == 3 and (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "replica_1" / "log_rank1.txt").stat().st_size


def test_lora_trains_and_sends_the_adapters_alone(tmp_path):
    pytest.importorskip("peft")
    script = [sys.executable, EXAMPLES / "train_lora.py", "20ba"]
    words = ["--set", "sync_every=10", "--", *script]
    summary, _ = launch(tmp_path, *words, **OFFLINE, TMPDIR=str(tmp_path))
    assert summary["outer_steps"] == 2
    syncs = syncs_of(tmp_path / "run" / "replica_0")
    # Two layers, each with A of 8 x 64 and B of 192 x 8, and the group's weight in the mean.
    numbers = 2 * 8 * (64 + 192) + 1
    assert {sync["diloco/bytes_sent"] for sync in syncs} == {4 * numbers}
