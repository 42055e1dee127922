"""The launcher with a command of the user's own that needs packages which only llm-foundry brings.

Run: make test-llmfoundry. Real: everything. The data are made here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import foundry
from harness.foundry import offline_environ
from run_events import syncs_of

pytestmark = [
    pytest.mark.llmfoundry,
    pytest.mark.timeout(500),  # more than that of the launcher: after it nobody would stop it
    pytest.mark.skipif(not foundry.is_installed(), reason=foundry.NOT_INSTALLED),
]

EXAMPLES = Path(__file__).parents[2] / "examples"


def launch(folder, *options_and_command):
    ours = ["-m", "composer_replication", "launch", "--replicas", "2", "--run-dir", folder / "run"]
    done = subprocess.run(
        [sys.executable, *map(str, (*ours, *options_and_command))],
        env=offline_environ(TMPDIR=str(folder)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=450,
    )
    logs = [log.read_text()[-2000:] for log in sorted(folder.glob("run/replica_*/log.txt"))]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    assert len(summary["replicas"]) == 2 and (folder / "run" / "report.html").exists()
    return summary


def test_a_script_with_a_hugging_face_model_in_groups_of_two_ranks(tmp_path):
    pytest.importorskip("transformers")
    script = [sys.executable, EXAMPLES / "train_hf.py", "30ba"]
    options = ["--nproc", "2", "--set", "sync_every=10"]
    assert launch(tmp_path, *options, "--", *script)["outer_steps"] == 3
    assert (tmp_path / "run" / "replica_1" / "log_rank1.txt").stat().st_size


def test_lora_trains_and_sends_the_adapters_alone(tmp_path):
    pytest.importorskip("peft")
    script = [sys.executable, EXAMPLES / "train_lora.py", "20ba"]
    assert launch(tmp_path, "--set", "sync_every=10", "--", *script)["outer_steps"] == 2
    syncs = syncs_of(tmp_path / "run" / "replica_0")
    # Two layers, each with A of 8 x 64 and B of 192 x 8, and the group's weight in the mean.
    numbers = 2 * 8 * (64 + 192) + 1
    assert {sync["diloco/bytes_sent"] for sync in syncs} == {4 * numbers}
