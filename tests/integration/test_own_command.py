"""The launcher with a script of the user's own. Run: pytest tests/integration/test_own_command.py

Real: everything; the script is one of ``examples``.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import forked_commands
import pytest
from pace import paced
from page_blocks import block

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"

# The command, with less time than in a run between the last fault and the end.
CHAOS = """
from composer_replication.launch import chaos_injector
chaos_injector.RECOVERY_S = 25.0
from composer_replication.cli import main
main()
"""


def run(start, *command, **environ):
    done = forked_commands.run(start, [sys.executable, *map(str, command)], timeout=600, **environ)
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
    said = run(subprocess.Popen, *ours, "--run-dir", tmp_path / "run", "--", *script)
    assert "equal in 2 groups after 3 outer steps" in said
    assert "sent by each group" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outer_steps"] == 3
    assert [replica["inner_steps"] for replica in summary["replicas"]] == [20, 21]
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    for name in ("config.yaml", "loss.png", "replica_1/metrics.jsonl", "replica_0/log.txt"):
        assert (tmp_path / "run" / name).stat().st_size, name


def test_a_script_under_faults_loses_nothing(tmp_path):
    line = block("docs/own-command.md", "composer-replication chaos")
    _, *ours, dashes, python, _, length = shlex.split(line.replace("=20", "=10"))
    assert (dashes, python, length) == ("--", "python", "1000000ba") and f"{SCRIPT.name} " in line
    options = "--duration 40 --faults-per-minute 12 --seed 0 --kinds one_way".split()
    ours = ["-c", CHAOS, *ours, *options]
    script = [sys.executable, SCRIPT, length]
    run(
        forked_commands.ForkedCommand,
        *ours,
        "--run-dir",
        tmp_path / "run",
        "--",
        *script,
        env=paced(0.03),
    )
    report = json.loads((tmp_path / "run" / "chaos.json").read_text())
    assert report["is_clean"] and report["violations"] == []
    assert {fault["kind"] for fault in report["injected"]} == {"one_way"}
