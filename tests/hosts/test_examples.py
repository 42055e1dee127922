"""The examples of Lightning and accelerate, under ``launch``. Run: pytest tests/hosts

Real: the command, a coordinator, groups as processes, ranks by ``accelerate launch``.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from harness.launching import ROOT, launch

from composer_replication.launch.run_record import open_run

pytestmark = [pytest.mark.integration, pytest.mark.slow]

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
    words = [ROOT / word if word.endswith(".py") else word for word in EXAMPLES[example]]
    for steps in (60, 80):
        command = ["--", sys.executable, *words, steps]
        summary, _ = launch(tmp_path, *command, run_dir=f"run_{steps}")
        assert [group["inner_steps"] for group in summary["replicas"]] == [steps, steps]
    # The page has a curve of each group.
    for group in open_run(tmp_path / "run_60"):
        assert len(group.losses.points) > 1 and all(loss > 0 for _, loss in group.losses.points)
