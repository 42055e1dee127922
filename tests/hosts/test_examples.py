"""The examples of Lightning and accelerate, under ``launch``. Run: pytest tests/hosts

Real: the command, a coordinator, groups as processes, ranks by ``accelerate launch``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from composer_replication.launch.run_record import open_run

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TWO_RANKS = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
EXAMPLES = {
    "lightning": ["examples/train_lightning.py"],
    "accelerate": ["examples/train_accelerate.py"],
    "accelerate, two ranks": [
        *TWO_RANKS, "--main_process_port", "0", "examples/train_accelerate.py"
    ],
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_in_two_groups_that_end_equal_and_goes_on(example, tmp_path):
    if not find_spec(example.partition(",")[0]):
        pytest.skip(f"{example} is not installed")
    launch = [sys.executable, "-m", "composer_replication", "launch", "--replicas", "2"]
    words = [str(ROOT / word) if word.endswith(".py") else word for word in EXAMPLES[example]]
    for steps in (60, 80):
        command = [*launch, "--run-dir", f"run_{steps}", "--", sys.executable, *words, str(steps)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / f"run_{steps}" / "summary.json").read_text())
        assert len({group["global_digest"] for group in summary["replicas"]}) == 1
        assert [group["inner_steps"] for group in summary["replicas"]] == [steps, steps]
    # The page has a curve of each group.
    for group in open_run(tmp_path / "run_60"):
        assert len(group.losses.points) > 1 and all(loss > 0 for _, loss in group.losses.points)


@pytest.mark.parametrize("example", ["lightning", "accelerate"])
def test_an_example_is_short(example):
    text = (ROOT / "examples" / f"train_{example}.py").read_text()
    assert len(text.splitlines()) <= 60
