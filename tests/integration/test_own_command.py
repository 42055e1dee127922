"""The launcher with a script of the user's own. Run: pytest tests/integration/test_own_command.py

Real: everything; the script is one of ``examples``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"


def test_a_launch_of_a_script_is_a_run_like_that_of_a_config(tmp_path):
    # Group 1 trains a batch more than group 0, if its id is where the braces were.
    script = [sys.executable, SCRIPT, "2{replica_id}ba"]
    ours = "-m composer_replication launch --replicas 2 --set sync_every=10 --run-dir".split()
    command = [sys.executable, *ours, tmp_path / "run", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "equal in 2 groups after 3 outer steps" in done.stdout
    assert "sent by each group" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outer_steps"] == 3
    assert [replica["inner_steps"] for replica in summary["replicas"]] == [20, 21]
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    for name in ("config.yaml", "report.html", "replica_1/events.jsonl", "replica_0/log.txt"):
        assert (tmp_path / "run" / name).stat().st_size, name
