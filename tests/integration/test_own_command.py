"""The launcher with a script of the user's own. Run: pytest tests/integration/test_own_command.py

Real: everything; the script is one of ``examples``.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import block

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"


def run(*command):
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_launch_of_a_script_is_a_run_like_that_of_a_config(tmp_path):
    on_pages = {
        block("README.md", "composer-replication launch"),
        block("docs/composer-job.md", "composer-replication launch"),
        block("docs/own-command.md", "composer-replication launch"),
    }
    (line,) = on_pages
    _, *ours, dashes, python, script = shlex.split(line.replace("sync_every=100", "sync_every=10"))
    assert (dashes, python, script) == ("--", "python", "train.py")
    # Group 1 trains a batch more than group 0, if its id is where the braces were.
    script = [sys.executable, SCRIPT, "2{replica_id}ba"]
    ours = ["-m", "composer_replication", *ours]
    said = run(*ours, "--run-dir", tmp_path / "run", "--", *script)
    assert "equal in 2 groups after 3 outer steps" in said
    assert "sent by each group" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outer_steps"] == 3
    assert [replica["inner_steps"] for replica in summary["replicas"]] == [20, 21]
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    for name in ("config.yaml", "report.html", "replica_1/events.jsonl", "replica_0/log.txt"):
        assert (tmp_path / "run" / name).stat().st_size, name
