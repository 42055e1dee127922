"""The launcher with a script of the user's own. Run: pytest tests/integration/test_own_command.py

Real: everything; the script is one of ``examples``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pace import paced

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"

# The command, with less time than in a run between the last fault and the end.
CHAOS = """
from composer_replication.launch import chaos_injector
chaos_injector.RECOVERY_S = 25.0
from composer_replication.cli import main
main()
"""


def run(*command, **environ):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=600,
        **environ,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_launch_of_a_script_is_a_run_like_that_of_a_config(tmp_path):
    ours = "-m composer_replication launch --replicas 2 --set sync_every=10".split()
    # Group 1 trains a batch more than group 0, if its id is where the braces were.
    script = [sys.executable, SCRIPT, "2{replica_id}ba"]
    said = run(*ours, "--run-dir", tmp_path / "run", "--", *script)
    assert "equal in 2 groups after 3 outer steps" in said
    assert "sent by each group" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outer_steps"] == 3
    assert [replica["inner_steps"] for replica in summary["replicas"]] == [20, 21]
    assert len({replica["global_digest"] for replica in summary["replicas"]}) == 1
    for name in ("config.yaml", "loss.png", "replica_1/metrics.jsonl", "replica_0/log.txt"):
        assert (tmp_path / "run" / name).stat().st_size, name


def test_a_script_under_faults_loses_nothing(tmp_path):
    options = "--replicas 3 --duration 40 --faults-per-minute 12 --seed 0 --kinds one_way".split()
    ours = ["-c", CHAOS, "chaos", *options, "--set", "sync_every=10"]
    script = [sys.executable, SCRIPT, "1000000ba"]
    run(*ours, "--run-dir", tmp_path / "run", "--", *script, env=paced(0.03))
    report = json.loads((tmp_path / "run" / "chaos.json").read_text())
    assert report["is_clean"] and report["violations"] == []
    assert {fault["kind"] for fault in report["injected"]} == {"one_way"}
