"""The launcher with a script of the user's own. Run: pytest tests/integration/test_own_command.py

Real: everything; the script is one of ``examples``.
"""

import sys
from pathlib import Path

import pytest
from harness.launching import launch

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"


def test_a_launch_of_a_script_is_a_run_like_that_of_a_config(tmp_path):
    # Group 1 trains a batch more than group 0, if its id is where the braces were.
    words = ["--set", "sync_every=10", "--", sys.executable, SCRIPT, "2{replica_id}ba"]
    summary, said = launch(tmp_path, *words)
    assert "equal in 2 groups after 3 outer steps" in said
    assert "sent by each group" in said
    assert summary["outer_steps"] == 3
    assert [replica["inner_steps"] for replica in summary["replicas"]] == [20, 21]
    for name in ("config.yaml", "report.html", "replica_1/events.jsonl", "replica_0/log.txt"):
        assert (tmp_path / "run" / name).stat().st_size, name
